// driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file; see test_writers.py.
mod trace_writer;
use trace_writer::TraceWriter;

fn numbers(text: &str) -> Vec<i64> {
    text.split([',', 'x']).filter(|word| !word.is_empty()).map(|word| word.parse().unwrap()).collect()
}

fn ids(text: &str) -> Vec<u32> {
    numbers(text).into_iter().map(|id| id as u32).collect()
}

fn lines(trace: &mut TraceWriter) -> std::io::Result<()> {
    let (n_tokens, n_keys) = (2, 2);
    /* LINES */
    let _: (usize, usize) = (n_tokens, n_keys);
    trace.add_tokens(&[])
}

fn run(args: &[String]) -> std::io::Result<()> {
    let bytes = std::fs::read(&args[2])?;
    let mut next = 0;
    let mut trace = TraceWriter::begin(&args[0], &ids(&args[1]))?;
    for line in std::fs::read_to_string(&args[3])?.lines() {
        let parts: Vec<&str> = line.split('\t').collect();
        match parts[..] {
            ["text", key, value] => trace.state(key, value)?,
            ["number", key, value] if !value.contains(['.', 'e']) => trace.state(key, value.parse::<i64>().unwrap())?,
            ["number", key, value] => trace.state(key, value.parse::<f64>().unwrap())?,
            ["flag", key, value] => trace.state(key, value == "true")?,
            ["list", key, value] => trace.state(key, ids(value))?,
            ["tokens", more] => trace.add_tokens(&ids(more))?,
            ["lines"] => lines(&mut trace)?,
            ["abort"] => std::process::abort(),
            ["end"] => return trace.end(),
            ["add", dtype, dims, name] => {
                let shape: Vec<usize> = numbers(dims).into_iter().map(|dim| dim as usize).collect();
                let size = if dtype == "F64" { 8 } else if dtype.ends_with("32") { 4 } else { 2 };
                let count = shape.iter().fold(size, |count: usize, &dim| count.wrapping_mul(dim)).min(bytes.len() - next);
                let own = &bytes[next..next + count];
                next += count;
                match dtype {
                    "F32" => trace.add(name, &own.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>(), &shape)?,
                    "F64" => trace.add_as(name, dtype, &own.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>(), &shape)?,
                    "I32" => trace.add_as(name, dtype, &own.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>(), &shape)?,
                    _ => trace.add_as(name, dtype, &own.chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>(), &shape)?,
                }
            }
            _ => unreachable!(),
        }
    }
    Ok(())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&args) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
