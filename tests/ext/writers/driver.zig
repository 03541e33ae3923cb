// driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file; see test_writers.py.
const std = @import("std");
const TraceWriter = @import("trace_writer.zig").TraceWriter;

const CFile = opaque {};
extern "c" fn fopen(path: [*:0]const u8, mode: [*:0]const u8) ?*CFile;
extern "c" fn fread(values: [*]u8, size: usize, count: usize, file: *CFile) usize;
extern "c" fn abort() noreturn;

var bytes: [1 << 19]u8 align(8) = undefined;
var words: [1 << 21]u8 = undefined;

fn readAll(path: [*:0]const u8, into: []u8) usize {
    return fread(into.ptr, 1, into.len, fopen(path, "rb").?);
}

fn numbers(comptime T: type, text: []const u8, into: []T) []T {
    var n: usize = 0;
    var parts = std.mem.tokenizeAny(u8, text, "x,");
    while (parts.next()) |part| : (n += 1) into[n] = @truncate(@as(u64, @bitCast(std.fmt.parseInt(i64, part, 10) catch unreachable)));
    return into[0..n];
}

fn lines(trace: *TraceWriter) !void {
    const n_tokens: usize = 2;
    const n_keys: usize = 2;
    // LINES
    _ = .{ trace, n_tokens, n_keys };
}

fn add(trace: *TraceWriter, comptime T: type, dtype: []const u8, shape: []const usize, name: []const u8, next: *usize) !void {
    var count: usize = 1;
    for (shape) |dim| count *|= dim;
    const own = @min(count, (bytes.len - next.*) / @sizeOf(T));
    const values = try std.heap.c_allocator.alloc(T, own);
    @memcpy(std.mem.sliceAsBytes(values), bytes[next.* .. next.* + own * @sizeOf(T)]);
    next.* += own * @sizeOf(T);
    if (T == u16 or T == i32) return trace.addAs(name, dtype, values, shape);
    return trace.add(name, values, shape);
}

fn run(trace: *TraceWriter, script: []const u8) !void {
    var next: usize = 0;
    var ids: [64]u32 = undefined;
    var shape: [64]usize = undefined;
    var rows = std.mem.splitScalar(u8, script, '\n');
    while (rows.next()) |row| {
        var parts = std.mem.splitScalar(u8, row, '\t');
        const word = parts.first();
        const a = parts.next() orelse "";
        const b = parts.next() orelse "";
        const c = parts.next() orelse "";
        if (std.mem.eql(u8, word, "text")) try trace.state(a, b);
        if (std.mem.eql(u8, word, "number")) {
            if (std.fmt.parseInt(i64, b, 10)) |whole| try trace.state(a, whole) else |_| try trace.state(a, std.fmt.parseFloat(f64, b) catch 0);
        }
        if (std.mem.eql(u8, word, "flag")) try trace.state(a, std.mem.eql(u8, b, "true"));
        if (std.mem.eql(u8, word, "list")) try trace.state(a, numbers(u32, b, &ids));
        if (std.mem.eql(u8, word, "tokens")) try trace.addTokens(numbers(u32, a, &ids));
        if (std.mem.eql(u8, word, "lines")) try lines(trace);
        if (std.mem.eql(u8, word, "abort")) abort();
        if (std.mem.eql(u8, word, "end")) try trace.end();
        if (!std.mem.eql(u8, word, "add")) continue;
        const dims = numbers(usize, b, &shape);
        if (std.mem.eql(u8, a, "F64")) try add(trace, f64, a, dims, c, &next) else if (std.mem.eql(u8, a, "F32")) try add(trace, f32, a, dims, c, &next) else if (std.mem.eql(u8, a, "F16")) try add(trace, f16, a, dims, c, &next) else if (std.mem.eql(u8, a, "I32")) try add(trace, i32, a, dims, c, &next) else try add(trace, u16, a, dims, c, &next);
    }
}

pub export fn main(argc: c_int, argv: [*][*:0]u8) c_int {
    if (argc < 5) return 3;
    _ = readAll(argv[3], &bytes);
    const script = words[0..readAll(argv[4], &words)];
    var ids: [64]u32 = undefined;
    const tokens = numbers(u32, std.mem.span(argv[2]), &ids);
    var trace = TraceWriter.begin(std.heap.c_allocator, std.mem.span(argv[1]), tokens) catch return 3;
    run(&trace, script) catch {
        std.debug.print("{s}\n", .{trace.message()});
        return 1;
    };
    return 0;
}
