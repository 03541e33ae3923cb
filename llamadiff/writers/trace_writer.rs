// llamadiff's trace writer for Rust. SPDX-License-Identifier: MIT. Paste it anywhere.
//
// Records what an engine computes, float32 tensors ("taps") in one .safetensors file:
//
//     let mut trace = TraceWriter::begin("mine.safetensors", &tokens)?;
//     trace.add("Qcur_rope-0", &q, &[n_tokens, n_heads, head_dim])?;
//     trace.end()?;
//
// An error ends the trace: later calls fail as well. The values are written when they are added, to path.part; it is
// renamed at the end, so a run that breaks off leaves no trace.
//
//     8 bytes                length of the header, little-endian
//     TRACE_HEADER_BYTES     the header: JSON, padded with spaces; its place is kept free and written last
//     the rest               the values, in the order they came
//
// Decode steps: a tap is added once and has one row for each token, the prompt's and then the steps'. Keep each tap's
// rows until the last token is known, then begin with all tokens and add. Scores are [head, query, key], and zero for
// the keys that came after the query.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Error, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Enough for 10000 taps; a multiple of 8.
const TRACE_HEADER_BYTES: usize = 1 << 20;

pub struct TraceWriter {
    path: PathBuf,
    part: PathBuf,
    file: Option<File>, // None once it is closed
    names: HashSet<String>,
    header: String, // text so far
    data_size: u64,
}

impl TraceWriter {
    /// Begin the trace of a run of these tokens.
    pub fn begin(path: impl AsRef<Path>, tokens: &[u32]) -> io::Result<TraceWriter> {
        let path = path.as_ref().to_path_buf();
        if tokens.is_empty() {
            return Err(invalid(format!("{}: the trace has no tokens", path.display())));
        }
        if let Some(i) = tokens.iter().position(|&token| token > i32::MAX as u32) {
            return Err(invalid(format!("{}: token {i} is {}, no token id", path.display(), tokens[i])));
        }
        // JSON in a JSON string
        let header = format!(
            r#"{{"__metadata__":{{"llamadiff":"{{\"schema\":\"llamadiff.trace/1\",\"tokens\":{}}}"}}"#,
            list(tokens)
        );
        if header.len() >= TRACE_HEADER_BYTES {
            return Err(invalid(format!("{}: too many tokens; raise TRACE_HEADER_BYTES", path.display())));
        }
        let mut part = path.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        let mut file = File::create(&part).map_err(|error| unwritten(&part, error))?;
        file.seek(SeekFrom::Start(8 + TRACE_HEADER_BYTES as u64))?;
        let names = HashSet::from(["__metadata__".to_string()]);
        Ok(TraceWriter { path, part, file: Some(file), names, header, data_size: 0 })
    }

    /// Write a tap: dims outermost first, values without gaps (C order).
    pub fn add(&mut self, name: &str, values: &[f32], shape: &[usize]) -> io::Result<()> {
        let result = self.append(name, values, shape);
        if result.is_err() {
            self.close();
        }
        result
    }

    fn append(&mut self, name: &str, values: &[f32], shape: &[usize]) -> io::Result<()> {
        let Some(file) = &mut self.file else {
            return Err(invalid(format!("{name}: added to a trace that has ended")));
        };
        if !(1..=256).contains(&name.len()) || name.bytes().any(|c| !(b' '..=b'~').contains(&c) || c == b'"') {
            return Err(invalid(format!("{name:?}: a name is 1 to 256 characters of printable ASCII without quotes")));
        }
        if self.names.contains(name) {
            return Err(invalid(format!("{name}: added twice; add the rows of all steps in one call")));
        }
        if !(1..=8).contains(&shape.len()) || shape.contains(&0) {
            return Err(invalid(format!("{name}: shape {shape:?}; 1 to 8 dims of at least 1 are possible")));
        }
        if shape.iter().try_fold(1, |count: usize, &dim| count.checked_mul(dim)) != Some(values.len()) {
            return Err(invalid(format!("{name}: {} values for shape {shape:?}", values.len())));
        }
        let (start, end) = (self.data_size, self.data_size + 4 * values.len() as u64);
        let key = name.replace('\\', "\\\\"); // all else that JSON escapes is no part of a name
        let shape = list(shape);
        let entry = format!(r#","{key}":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}"#);
        if self.header.len() + entry.len() >= TRACE_HEADER_BYTES {
            return Err(invalid(format!("{name}: too many taps, the header is full; raise TRACE_HEADER_BYTES")));
        }
        for some in values.chunks(1 << 16) {
            let bytes: Vec<u8> = some.iter().flat_map(|value| value.to_le_bytes()).collect();
            file.write_all(&bytes).map_err(|error| unwritten(&self.part, error))?;
        }
        self.header += &entry;
        self.names.insert(name.to_string());
        self.data_size = end;
        Ok(())
    }

    /// Write the header and give the file its name.
    pub fn end(mut self) -> io::Result<()> {
        let Some(mut file) = self.file.as_ref() else {
            return Err(invalid(format!("{}: the trace has ended before", self.path.display())));
        };
        let padding = " ".repeat(TRACE_HEADER_BYTES - self.header.len() - 1);
        let header = format!("{}}}{padding}", self.header);
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&(TRACE_HEADER_BYTES as u64).to_le_bytes()))
            .and_then(|_| file.write_all(header.as_bytes()))
            .and_then(|_| fs::rename(&self.part, &self.path))
            .map_err(|error| unwritten(&self.path, error))?;
        self.file = None; // nothing is left for drop to remove
        Ok(())
    }

    /// Remove the file, which has not got its name.
    fn close(&mut self) {
        if self.file.take().is_some() {
            let _ = fs::remove_file(&self.part);
        }
    }
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        self.close();
    }
}

/// As JSON: [1,2,3]
fn list<T: ToString>(numbers: &[T]) -> String {
    let words: Vec<String> = numbers.iter().map(T::to_string).collect();
    format!("[{}]", words.join(","))
}

fn invalid(reason: String) -> Error {
    Error::new(ErrorKind::InvalidInput, reason)
}

fn unwritten(path: &Path, error: Error) -> Error {
    Error::new(error.kind(), format!("{}: cannot be written ({error})", path.display()))
}
