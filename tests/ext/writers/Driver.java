// Driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file; see test_writers.py.
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.Arrays;

class Driver {
    private static ByteBuffer bytes;

    static long[] numbers(String text) {
        return Arrays.stream(text.split("[x,]")).filter(word -> !word.isEmpty()).mapToLong(Long::parseLong).toArray();
    }

    static int[] ids(String text) {
        return Arrays.stream(numbers(text)).mapToInt(id -> (int) id).toArray();
    }

    static void lines(TraceWriter trace) {
        long n_tokens = 2, n_keys = 2;
        /* LINES */
    }

    static void add(TraceWriter trace, String dtype, long[] shape, String name) {
        int size = dtype.equals("F64") ? 8 : dtype.endsWith("32") ? 4 : 2;
        long count = Math.abs(Arrays.stream(shape).reduce(1, (a, b) -> a * b));
        int n = (int) Math.min(count, bytes.remaining() / size);
        ByteBuffer own = bytes.slice().order(ByteOrder.LITTLE_ENDIAN);
        bytes.position(bytes.position() + n * size);
        if (dtype.equals("F64")) {
            double[] values = new double[n];
            own.asDoubleBuffer().get(values);
            trace.add(name, values, shape);
        } else if (dtype.equals("F32")) {
            float[] values = new float[n];
            own.asFloatBuffer().get(values);
            trace.add(name, values, shape);
        } else if (dtype.equals("I32")) {
            int[] values = new int[n];
            own.asIntBuffer().get(values);
            trace.addAs(name, dtype, values, shape);
        } else {
            short[] values = new short[n];
            own.asShortBuffer().get(values);
            trace.addAs(name, dtype, values, shape);
        }
    }

    static void run(String[] args) throws Exception {
        bytes = ByteBuffer.wrap(Files.readAllBytes(Paths.get(args[2])));
        TraceWriter trace = new TraceWriter(args[0], ids(args[1]));
        for (String line : Files.readAllLines(Paths.get(args[3]))) {
            String[] parts = line.split("\t", -1);
            switch (parts[0]) {
                case "text": trace.state(parts[1], parts[2]); break;
                case "number":
                    if (parts[2].matches("-?\\d+")) trace.state(parts[1], Long.valueOf(parts[2]));
                    else trace.state(parts[1], Double.valueOf(parts[2]));
                    break;
                case "flag": trace.state(parts[1], Boolean.valueOf(parts[2])); break;
                case "list": trace.state(parts[1], ids(parts[2])); break;
                case "tokens": trace.addTokens(ids(parts[1])); break;
                case "lines": lines(trace); break;
                case "abort": Runtime.getRuntime().halt(134); break;
                case "end": trace.end(); break;
                default: add(trace, parts[1], numbers(parts[2]), parts[3]);
            }
        }
    }

    public static void main(String[] args) {
        try {
            run(args);
        } catch (Exception error) {
            System.err.println(error instanceof java.io.IOException ? error.toString() : error.getMessage());
            System.exit(1);
        }
    }
}
