// driver OUT TOKENS VALUES LAST [NAME:2x3]...: writes taps with values from a file of f32; LAST: end or abort.
mod trace_writer;
use trace_writer::TraceWriter;

fn numbers(text: &str) -> Vec<i64> {
    text.split([',', 'x']).filter(|word| !word.is_empty()).map(|word| word.parse().unwrap()).collect()
}

fn run(args: &[String]) -> std::io::Result<()> {
    let tokens: Vec<u32> = numbers(&args[1]).into_iter().map(|id| id as u32).collect();
    let bytes = std::fs::read(&args[2])?;
    let values: Vec<f32> = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    let mut trace = TraceWriter::begin(&args[0], &tokens)?;
    let mut next = 0;
    for tap in &args[4..] {
        let (name, dims) = tap.rsplit_once(':').unwrap();
        let shape: Vec<usize> = numbers(dims).into_iter().map(|dim| dim as usize).collect();
        let count = shape.iter().fold(1, |count: usize, &dim| count.wrapping_mul(dim)).min(values.len() - next);
        trace.add(name, &values[next..next + count], &shape)?;
        next += count;
    }
    if args[3] == "abort" {
        std::process::abort();
    }
    trace.end()
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&args) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
