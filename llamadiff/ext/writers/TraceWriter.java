// llamadiff's trace writer for Java 11 and later. SPDX-License-Identifier: MIT. Paste it anywhere.
//
// Records what an engine computes, its tensors ("taps"), in one .safetensors file:
//
//     TraceWriter trace = new TraceWriter("mine.safetensors", tokens);  // the prompt's ids
//     trace.state("name", "my engine");                                 // what is known of the run
//     trace.add("Qcur_rope-0", q, nTokens, nHeads, headDim);            // q: a float[] or double[]
//     trace.addTokens(next);                                            // a decode step: its id,
//     trace.add("Qcur_rope-0", q, 1, nHeads, headDim);                  // and its row below those before
//     trace.end();
//
// An error is an exception. Values are copied and kept in memory until the end. It writes path.part and renames it to
// path: a trace of before is replaced, and a run that breaks off leaves it as it was.
import java.io.BufferedOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.nio.file.StandardCopyOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

class TraceWriter {
    private static final Map<String, Integer> SIZES = Map.of("F64", 8, "F32", 4, "F16", 2, "BF16", 2, "I32", 4);
    private static final List<String> RUN = List.of("prompt", "n_prefill", "positions", "batches");
    private static final List<String> PRODUCER = List.of("name", "version");
    private static final List<String> GROUPS = List.of("settings", "hyperparameters", "model");
    // The axis of these that runs over tokens is the second: [head, query, ...].
    private static final List<String> BY_HEAD = List.of("kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-");

    private static final class Part { // what one call added
        long[] shape;
        byte[] bytes;
    }

    private static final class Tap {
        String dtype;
        long[] shape; // with all rows
        int axis; // the one that runs over tokens
        final List<Part> parts = new ArrayList<>();
    }

    private final String path;
    private final int nPrompt;
    private boolean ended;
    private final List<Integer> tokens = new ArrayList<>();
    private final Map<String, Map<String, String>> facts = new LinkedHashMap<>(); // group -> key -> JSON
    private final Map<String, Tap> taps = new LinkedHashMap<>();

    /** Begin the trace of a run of these tokens: the prompt's; those of decode steps may follow. */
    TraceWriter(String path, int... tokens) {
        this.path = path;
        nPrompt = tokens.length;
        if (nPrompt == 0) throw new IllegalArgumentException(path + ": the trace has no tokens");
        addTokens(tokens);
    }

    /** The ids that a decode step runs. */
    final void addTokens(int... ids) {
        for (int id : ids) {
            check(id >= 0, path, "token " + tokens.size() + " is " + id + ", no token id");
            tokens.add(id);
        }
    }

    /**
     * State what is known of the run: name, version, prompt, n_prefill (how many tokens were run in one go; the
     * prompt's, if not stated), positions, batches (how many ran at a time, if not one by one after the prompt),
     * settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn,
     * hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256.
     * A value is text, a number, a Boolean, or an int[].
     */
    void state(String key, Object value) {
        int dot = key.indexOf('.') + 1;
        boolean whole = RUN.contains(key) || PRODUCER.contains(key);
        String first = key.substring(0, Math.max(0, dot - 1));
        String group = RUN.contains(key) ? "run" : PRODUCER.contains(key) ? "producer" : first;
        check(whole || GROUPS.contains(group) && dot < key.length(), key, "nothing is stated by that name");
        String json = value instanceof int[] ? Arrays.toString((int[]) value) : value.toString();
        boolean good = value instanceof Boolean || value instanceof int[]
            || value instanceof Number && Double.isFinite(((Number) value).doubleValue());
        check(value instanceof String || good, key, json + " cannot be stated");
        Map<String, String> own = facts.computeIfAbsent(group, name -> new LinkedHashMap<>());
        String before = own.put(whole ? key : key.substring(dot), value instanceof String ? quoted(json) : json);
        check(before == null, key, "stated twice");
    }

    /**
     * Add the rows of a tap: values without gaps (C order) and dims, outermost first. Rows that are added under the
     * same name go below those before; scores may see more keys each time, and keys not yet seen are zero.
     */
    void add(String name, float[] values, long... shape) {
        addAs(name, "F32", values, shape);
    }

    void add(String name, double[] values, long... shape) {
        addAs(name, "F64", values, shape);
    }

    /** The same for F16 and BF16 (a short[]: their bits) and I32 (an int[]). */
    void addAs(String name, String dtype, Object values, long... shape) {
        check(!ended, path, "the trace has ended");
        check(SIZES.containsKey(dtype), name, "type " + dtype + "; F64, F32, F16, BF16 and I32 are possible");
        check(!name.isEmpty() && !name.equals("__metadata__"), quoted(name), "is no name of a tap");
        boolean good = shape.length >= 1 && shape.length <= 8 && Arrays.stream(shape).allMatch(dim -> dim >= 1);
        check(good, name, "shape " + Arrays.toString(shape) + "; 1 to 8 dims of at least 1 are possible");
        Part part = new Part();
        part.shape = shape.clone();
        part.bytes = littleEndian(name, values);
        double size = SIZES.get(dtype);
        for (long dim : shape) size *= dim;
        check(size == part.bytes.length && width(values) == SIZES.get(dtype), name, part.bytes.length + " bytes, "
            + width(values) + " a value, for " + dtype + " " + Arrays.toString(shape));
        Tap tap = taps.getOrDefault(name, new Tap());
        if (tap.parts.isEmpty()) {
            tap.dtype = dtype;
            tap.shape = shape.clone();
            tap.axis = shape.length == 3 && BY_HEAD.stream().anyMatch(name::startsWith) ? 1 : 0;
            tap.shape[tap.axis] = 0;
        }
        boolean alike = tap.dtype.equals(dtype) && tap.shape.length == shape.length;
        for (int i = 0; alike && i < shape.length; i++) {
            alike = i == tap.axis || tap.axis == 1 && i == 2 || tap.shape[i] == shape[i];
        }
        check(alike, name, "rows of another type or shape cannot follow those before");
        tap.shape[tap.axis] += shape[tap.axis];
        if (tap.axis == 1) tap.shape[2] = Math.max(tap.shape[2], shape[2]);
        tap.parts.add(part);
        taps.put(name, tap);
    }

    /** Write the file. */
    void end() throws IOException {
        check(!ended, path, "the trace has ended");
        ended = true;
        Path part = Paths.get(path + ".part");
        try {
            try (OutputStream file = new BufferedOutputStream(Files.newOutputStream(part))) {
                byte[] header = header().getBytes(StandardCharsets.UTF_8);
                byte[] padded = Arrays.copyOf(header, (header.length + 7) / 8 * 8);
                Arrays.fill(padded, header.length, padded.length, (byte) ' ');
                file.write(ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(padded.length).array());
                file.write(padded);
                for (Tap tap : taps.values()) write(file, tap);
            }
            Files.move(part, Paths.get(path), StandardCopyOption.ATOMIC_MOVE);
        } catch (IOException error) {
            Files.deleteIfExists(part);
            throw error;
        }
    }

    /** Part below part, for each head; where a row is shorter than the longest, it is zero. */
    private static void write(OutputStream file, Tap tap) throws IOException {
        int n = tap.shape.length, size = SIZES.get(tap.dtype);
        int longest = (int) product(tap.shape, tap.axis + 1, n) * size;
        for (long head = 0; head < product(tap.shape, 0, tap.axis); head++) {
            for (Part part : tap.parts) {
                int row = (int) product(part.shape, tap.axis + 1, n) * size;
                byte[] zeros = new byte[longest - row];
                for (long i = 0; i < part.shape[tap.axis]; i++) {
                    file.write(part.bytes, (int) (head * part.shape[tap.axis] + i) * row, row);
                    file.write(zeros);
                }
            }
        }
    }

    private String header() {
        String run = listed("run");
        if (tokens.size() > nPrompt && !run.contains("\"n_prefill\":")) run += ",\"n_prefill\":" + nPrompt;
        String producer = listed("producer") + object("settings") + object("hyperparameters");
        String info = "{\"schema\":\"llamadiff.trace/1\",\"tokens\":" + tokens + run
            + ",\"producer\":{\"writer\":\"java\"" + producer + "}" + object("model") + "}";
        StringBuilder text = new StringBuilder("{\"__metadata__\":{\"llamadiff\":" + quoted(info) + "}");
        long end = 0;
        for (Map.Entry<String, Tap> entry : taps.entrySet()) {
            Tap tap = entry.getValue();
            long start = end;
            end += product(tap.shape, 0, tap.shape.length) * SIZES.get(tap.dtype);
            text.append(String.format(",%s:{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%d,%d]}",
                quoted(entry.getKey()), tap.dtype, Arrays.toString(tap.shape), start, end));
        }
        return text.append("}").toString();
    }

    /** ,"key":value for each fact of a group. */
    private String listed(String group) {
        StringBuilder out = new StringBuilder();
        facts.getOrDefault(group, Map.of()).forEach((key, json) -> out.append("," + quoted(key) + ":" + json));
        return out.toString();
    }

    private String object(String group) {
        String inner = listed(group);
        return inner.isEmpty() ? "" : ",\"" + group + "\":{" + inner.substring(1) + "}";
    }

    private static int width(Object values) {
        return values instanceof double[] ? 8 : values instanceof short[] ? 2 : 4;
    }

    private static byte[] littleEndian(String name, Object values) {
        int length = values.getClass().isArray() ? java.lang.reflect.Array.getLength(values) : 0;
        ByteBuffer bytes = ByteBuffer.allocate(Math.multiplyExact(length, width(values)));
        bytes.order(ByteOrder.LITTLE_ENDIAN);
        if (values instanceof float[]) bytes.asFloatBuffer().put((float[]) values);
        else if (values instanceof double[]) bytes.asDoubleBuffer().put((double[]) values);
        else if (values instanceof short[]) bytes.asShortBuffer().put((short[]) values);
        else if (values instanceof int[]) bytes.asIntBuffer().put((int[]) values);
        else throw new IllegalArgumentException(name + ": the values are no float[], double[], short[] or int[]");
        return bytes.array();
    }

    private static long product(long[] shape, int from, int to) {
        return Arrays.stream(shape, from, to).reduce(1, (a, b) -> a * b);
    }

    private static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c < ' ') out.append(String.format("\\u%04x", (int) c));
            else out.append(c == '"' || c == '\\' ? "\\" : "").append(c);
        }
        return out.append('"').toString();
    }

    private static void check(boolean good, String what, String why) {
        if (!good) throw new IllegalArgumentException(what + ": " + why);
    }
}
