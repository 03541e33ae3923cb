// llamadiff's trace writer for Rust. SPDX-License-Identifier: MIT. Paste it anywhere.
//
// Records what an engine computes, its tensors ("taps"), in one .safetensors file:
//
//     let mut trace = TraceWriter::begin("mine.safetensors", &tokens)?; // the prompt's ids
//     trace.state("name", "my engine")?; // what is known of the run
//     trace.add("Qcur_rope-0", &q, &[n_tokens, n_heads, head_dim])?;
//     trace.add_tokens(&[next])?; // a decode step: its id,
//     trace.add("Qcur_rope-0", &q, &[1, n_heads, head_dim])?; // and its row below those before
//     trace.end()?;
//
// Values are copied and kept in memory until the end. It writes path.part and renames it to path: a trace of before is
// replaced, and a run that breaks off leaves it as it was.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufWriter, Error, ErrorKind, Write};

/// The axis of these that runs over tokens is the second: [head, query, ...].
const BY_HEAD: [&str; 5] = ["kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-"];

/// What values may be made of: f32, f64, i32, or the bits of a float16 or bfloat16.
pub trait Bits: Copy {
    fn put(self, bytes: &mut Vec<u8>);
}

macro_rules! bits {
    ($($t:ty),*) => {$(impl Bits for $t {
        fn put(self, bytes: &mut Vec<u8>) {
            bytes.extend_from_slice(&self.to_le_bytes());
        }
    })*};
}
bits!(f64, f32, u16, i32);

struct Tap {
    name: String,
    dtype: String,
    size: usize, // bytes of a value
    axis: usize, // the one that runs over tokens
    shape: Vec<usize>,
    parts: Vec<(Vec<usize>, Vec<u8>)>, // what each call added
}

pub struct TraceWriter {
    path: String,
    tokens: Vec<u32>,
    n_prompt: usize,
    facts: BTreeMap<String, BTreeMap<String, String>>, // group -> key -> JSON
    taps: Vec<Tap>,
    places: HashMap<String, usize>,
}

#[allow(dead_code)] // an engine need not use all of it
impl TraceWriter {
    /// Begin the trace of a run of these tokens: the prompt's; those of decode steps may follow.
    pub fn begin(path: &str, tokens: &[u32]) -> io::Result<TraceWriter> {
        if tokens.is_empty() {
            return Err(invalid(path, "the trace has no tokens"));
        }
        let (facts, places) = (BTreeMap::new(), HashMap::new());
        let (path, n_prompt) = (path.to_string(), tokens.len());
        let mut trace = TraceWriter { path, tokens: vec![], n_prompt, facts, taps: vec![], places };
        trace.add_tokens(tokens)?;
        Ok(trace)
    }

    /// The ids that a decode step runs.
    pub fn add_tokens(&mut self, tokens: &[u32]) -> io::Result<()> {
        for &id in tokens {
            if id > i32::MAX as u32 {
                return Err(invalid(&self.path, &format!("token {} is {id}, no token id", self.tokens.len())));
            }
            self.tokens.push(id);
        }
        Ok(())
    }

    /// State what is known of the run: name, version, prompt, n_prefill (how many tokens were run in one go; the
    /// prompt's, if not stated), positions, batches (how many ran at a time, if not one by one after the prompt),
    /// settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn,
    /// hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256.
    /// A value is text, a number, a bool, or a vector of whole numbers.
    pub fn state(&mut self, key: &str, value: impl Fact) -> io::Result<()> {
        let (group, name) = match (key, key.split_once('.')) {
            ("prompt" | "n_prefill" | "positions" | "batches", _) => ("run", key),
            ("name" | "version", _) => ("producer", key),
            (_, Some((group @ ("settings" | "hyperparameters" | "model"), name))) => (group, name),
            _ => return Err(invalid(key, "nothing is stated by that name")),
        };
        let json = value.json();
        if json.ends_with("inf") || json == "NaN" {
            return Err(invalid(key, &format!("{json} is no number of JSON")));
        }
        match self.facts.entry(group.to_string()).or_default().insert(name.to_string(), json) {
            Some(_) => Err(invalid(key, "stated twice")),
            None => Ok(()),
        }
    }

    /// Add the rows of a tap: values without gaps (C order) and dims, outermost first. Rows that are added under the
    /// same name go below those before; scores may see more keys each time, and keys not yet seen are zero.
    pub fn add(&mut self, name: &str, values: &[f32], shape: &[usize]) -> io::Result<()> {
        self.add_as(name, "F32", values, shape)
    }

    /// The same for F64 (f64), I32 (i32), F16 and BF16 (u16: their bits).
    pub fn add_as<T: Bits>(&mut self, name: &str, dtype: &str, values: &[T], shape: &[usize]) -> io::Result<()> {
        let size = match dtype {
            "F64" => 8,
            "F32" | "I32" => 4,
            "F16" | "BF16" => 2,
            _ => return Err(invalid(name, &format!("type {dtype}; F64, F32, F16, BF16 and I32 are possible"))),
        };
        if name.is_empty() || name == "__metadata__" {
            return Err(invalid(&format!("{name:?}"), "is no name of a tap"));
        }
        if !(1..=8).contains(&shape.len()) || shape.contains(&0) {
            return Err(invalid(name, &format!("shape {shape:?}; 1 to 8 dims of at least 1 are possible")));
        }
        let count = shape.iter().try_fold(1, |count: usize, &dim| count.checked_mul(dim));
        if count != Some(values.len()) || size != std::mem::size_of::<T>() {
            let bits = 8 * std::mem::size_of::<T>();
            return Err(invalid(name, &format!("{} values of {bits} bits for {dtype} {shape:?}", values.len())));
        }
        let axis = usize::from(shape.len() == 3 && BY_HEAD.iter().any(|word| name.starts_with(word)));
        let place = *self.places.entry(name.to_string()).or_insert(self.taps.len());
        if place == self.taps.len() {
            let (name, dtype, mut none) = (name.to_string(), dtype.to_string(), shape.to_vec());
            none[axis] = 0;
            self.taps.push(Tap { name, dtype, size, axis, shape: none, parts: vec![] });
        }
        let tap = &mut self.taps[place];
        let alike = |i: usize| i == axis || (axis == 1 && i == 2) || tap.shape[i] == shape[i];
        if tap.dtype != dtype || tap.shape.len() != shape.len() || !(0..shape.len()).all(alike) {
            return Err(invalid(name, "rows of another type or shape cannot follow those before"));
        }
        tap.shape[axis] += shape[axis];
        if axis == 1 {
            tap.shape[2] = tap.shape[2].max(shape[2]);
        }
        let mut bytes = Vec::with_capacity(values.len() * size);
        values.iter().for_each(|value| value.put(&mut bytes));
        tap.parts.push((shape.to_vec(), bytes));
        Ok(())
    }

    /// Write the file.
    pub fn end(self) -> io::Result<()> {
        let part = format!("{}.part", self.path);
        let unwritten = |path: &str, error: Error| {
            let _ = fs::remove_file(&part);
            Error::new(error.kind(), format!("{path}: cannot be written ({error})"))
        };
        self.write(&part).map_err(|error| unwritten(&part, error))?;
        fs::rename(&part, &self.path).map_err(|error| unwritten(&self.path, error))
    }

    fn write(&self, part: &str) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(part)?);
        let header = self.header();
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        for tap in &self.taps {
            let longest = tap.shape[tap.axis + 1..].iter().product::<usize>() * tap.size;
            for head in 0..tap.shape[..tap.axis].iter().product() {
                for (shape, bytes) in &tap.parts {
                    let row = shape[tap.axis + 1..].iter().product::<usize>() * tap.size;
                    for i in 0..shape[tap.axis] {
                        let start = (head * shape[tap.axis] + i) * row;
                        file.write_all(&bytes[start..start + row])?;
                        file.write_all(&vec![0; longest - row])?;
                    }
                }
            }
        }
        file.flush()
    }

    fn header(&self) -> String {
        let nothing = BTreeMap::new();
        let facts = |group: &str| self.facts.get(group).unwrap_or(&nothing).iter();
        let listed = |group| facts(group).map(|(key, json)| format!(",{}:{json}", quoted(key))).collect::<String>();
        let object = |group| match listed(group) {
            inner if inner.is_empty() => inner,
            inner => format!(r#","{group}":{{{}}}"#, &inner[1..]),
        };
        let mut run = listed("run");
        if self.tokens.len() > self.n_prompt && !facts("run").any(|(key, _)| key == "n_prefill") {
            run += &format!(r#","n_prefill":{}"#, self.n_prompt);
        }
        let producer = listed("producer") + &object("settings") + &object("hyperparameters");
        let producer = format!(r#"{{"writer":"rust"{producer}}}"#);
        let (tokens, model) = (&self.tokens, object("model"));
        let info = format!(r#"{{"schema":"llamadiff.trace/1","tokens":{tokens:?}{run},"producer":{producer}{model}}}"#);
        let mut text = format!(r#"{{"__metadata__":{{"llamadiff":{}}}"#, quoted(&info)); // JSON in a string of JSON
        let mut end = 0;
        for Tap { name, dtype, size, shape, .. } in &self.taps {
            let start = end;
            end += shape.iter().product::<usize>() * size;
            let name = quoted(name);
            text += &format!(r#",{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
        }
        text.push('}');
        let padding = text.len().next_multiple_of(8) - text.len();
        text + &" ".repeat(padding)
    }
}

/// What may be stated: as JSON.
pub trait Fact {
    fn json(&self) -> String;
}

impl Fact for &str {
    fn json(&self) -> String {
        quoted(self)
    }
}

macro_rules! facts {
    ($($t:ty),*) => {$(impl Fact for $t {
        fn json(&self) -> String {
            format!("{self:?}")
        }
    })*};
}
facts!(bool, i32, u32, i64, u64, usize, f32, f64, Vec<i32>, Vec<u32>, Vec<usize>);

fn quoted(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        '\0'..='\x1f' => format!("\\u{:04x}", c as u32),
        _ => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

fn invalid(what: &str, why: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{what}: {why}"))
}
