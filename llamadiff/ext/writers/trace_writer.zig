// llamadiff's trace writer for Zig. SPDX-License-Identifier: MIT. Paste it anywhere; link with libc (-lc).
//
// Records what an engine computes, its tensors ("taps"), in one .safetensors file:
//
//     var trace = try TraceWriter.begin(allocator, "mine.safetensors", tokens); // the prompt's ids, []const u32
//     errdefer std.debug.print("{s}\n", .{trace.message()}); // what an error of it was
//     try trace.state("name", "my engine"); // what is known of the run
//     try trace.add("Qcur_rope-0", q, &.{ n_tokens, n_heads, head_dim }); // q: a slice of f32, f64 or f16
//     try trace.addTokens(&.{next}); // a decode step: its id,
//     try trace.add("Qcur_rope-0", q, &.{ 1, n_heads, head_dim }); // and its row below those before
//     try trace.end();
//
// Values are copied and kept in memory until the end; all of it is the allocator's, best an arena's. The end writes
// path.part and renames it to path: a trace of before is replaced, and a run that breaks off leaves it as it was.
// Files are C's, whose interface stays the same from one version of Zig to the next.
const std = @import("std");

const CFile = opaque {};
extern "c" fn fopen(path: [*:0]const u8, mode: [*:0]const u8) ?*CFile;
extern "c" fn fwrite(values: [*]const u8, size: usize, count: usize, file: *CFile) usize;
extern "c" fn fclose(file: *CFile) c_int;
extern "c" fn rename(from: [*:0]const u8, to: [*:0]const u8) c_int;
extern "c" fn remove(path: [*:0]const u8) c_int;

pub const TraceWriter = struct {
    pub const Error = error{ Refused, Unwritten, OutOfMemory };

    /// What one call added; `more` are further rows of the same tap.
    const Part = struct {
        name: []const u8,
        dtype: []const u8,
        shape: []usize,
        whole: []usize, // the shape with all rows; the first part's
        bytes: []u8,
        next: ?*Part = null, // the next tap
        more: ?*Part = null,
        last: *Part = undefined, // of this tap
    };

    const Text = struct { buffer: []u8 = &.{}, len: usize = 0 };

    allocator: std.mem.Allocator,
    path: [:0]const u8,
    part: [:0]const u8,
    n_tokens: usize = 0,
    n_prompt: usize,
    tokens: Text = .{},
    facts: [5]Text = @splat(.{}), // of the run, the producer, its settings and hyper-parameters, the model
    first: ?*Part = null,
    newest: ?*Part = null,
    ended: bool = false,
    reason: [400]u8 = undefined,
    reason_len: usize = 0,
    name_buffer: [128]u8 = undefined,

    /// Begin the trace of a run of these tokens: the prompt's; those of decode steps may follow.
    pub fn begin(allocator: std.mem.Allocator, path: []const u8, tokens: []const u32) Error!TraceWriter {
        const own = try joined(allocator, &.{path});
        const part = try joined(allocator, &.{ path, ".part" });
        var w = TraceWriter{ .allocator = allocator, .path = own, .part = part, .n_prompt = tokens.len };
        if (tokens.len == 0) w.refuse("{s}: the trace has no tokens", .{own}) catch {};
        w.addTokens(tokens) catch |failed| if (failed != error.Refused) return failed;
        return w; // what was refused, the end says
    }

    /// What the last error was.
    pub fn message(w: *const TraceWriter) []const u8 {
        return w.reason[0..w.reason_len];
    }

    /// The ids that a decode step runs.
    pub fn addTokens(w: *TraceWriter, tokens: []const u32) Error!void {
        for (tokens) |id| {
            if (id > std.math.maxInt(i32))
                return w.refuse("{s}: token {d} is {d}, no token id", .{ w.path, w.n_tokens, id });
            try w.print(&w.tokens, "{s}{d}", .{ if (w.n_tokens > 0) "," else "", id });
            w.n_tokens += 1;
        }
    }

    /// State what is known of the run: name, version, prompt, n_prefill (how many tokens were run in one go; the
    /// prompt's, if not stated), positions, batches (how many ran at a time, if not one by one after the prompt),
    /// settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn,
    /// hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256.
    /// A value is text, a number, a bool, or a slice of whole numbers.
    pub fn state(w: *TraceWriter, key: []const u8, value: anytype) Error!void {
        const keys = [_][]const u8{
            "prompt", "n_prefill", "positions", "batches", "name", "version", "settings.", "hyperparameters.", "model.",
        };
        const groups = [_]usize{ 0, 0, 0, 0, 1, 1, 2, 3, 4 };
        for (keys, groups, 0..) |known, group, i| {
            const whole = i < 6;
            if (if (whole) !std.mem.eql(u8, key, known) else !std.mem.startsWith(u8, key, known)) continue;
            var quoted = Text{};
            try w.quote(&quoted, if (whole) key else key[known.len..]);
            try w.append(&quoted, ":");
            const fact = &w.facts[group];
            if (std.mem.indexOf(u8, fact.buffer[0..fact.len], quoted.buffer[0..quoted.len]) != null)
                return w.refuse("{s}: stated twice", .{key});
            try w.append(fact, ",");
            try w.append(fact, quoted.buffer[0..quoted.len]);
            return w.json(fact, key, value);
        }
        return w.refuse("{s}: nothing is stated by that name", .{key});
    }

    /// A tap's name in a layer, until the next call: trace.name("l_out", 3) is "l_out-3".
    pub fn name(w: *TraceWriter, word: []const u8, layer: usize) []const u8 {
        return std.fmt.bufPrint(&w.name_buffer, "{s}-{d}", .{ word, layer }) catch word;
    }

    /// Add the rows of a tap: values without gaps (C order) and dims, outermost first. Rows that are added under the
    /// same name go below those before; scores may see more keys each time, and keys not yet seen are zero.
    pub fn add(w: *TraceWriter, tap: []const u8, values: anytype, shape: []const usize) Error!void {
        const dtype = switch (std.meta.Elem(@TypeOf(values))) {
            f64 => "F64",
            f32 => "F32",
            f16 => "F16",
            else => @compileError("values are f64, f32 or f16; others: addAs"),
        };
        return w.addAs(tap, dtype, values, shape);
    }

    /// The same for BF16 (u16: its bits) and I32.
    pub fn addAs(
        w: *TraceWriter,
        tap: []const u8,
        dtype: []const u8,
        values: anytype,
        shape: []const usize,
    ) Error!void {
        const size = sizeOf(dtype) orelse
            return w.refuse("{s}: type {s}; F64, F32, F16, BF16 and I32 are possible", .{ tap, dtype });
        if (w.ended) return w.refuse("{s}: the trace has ended", .{w.path});
        if (tap.len == 0 or std.mem.eql(u8, tap, "__metadata__"))
            return w.refuse("\"{s}\": is no name of a tap", .{tap});
        if (shape.len < 1 or shape.len > 8)
            return w.refuse("{s}: {d} dims; 1 to 8 of at least 1 are possible", .{ tap, shape.len });
        var count: usize = 1;
        for (shape) |dim| {
            if (dim < 1) return w.refuse("{s}: a dim is 0; 1 to 8 of at least 1 are possible", .{tap});
            count *|= dim;
        }
        const bits = @bitSizeOf(std.meta.Elem(@TypeOf(values)));
        if (count != values.len or bits != 8 * size)
            return w.refuse("{s}: {d} values of {d} bits for {d} of {s}", .{ tap, values.len, bits, count, dtype });
        const part = try w.allocator.create(Part);
        const bytes = try w.allocator.dupe(u8, std.mem.sliceAsBytes(values));
        if (@import("builtin").cpu.arch.endian() == .big) {
            var at: usize = 0;
            while (at < bytes.len) : (at += size) std.mem.reverse(u8, bytes[at .. at + size]);
        }
        part.* = .{
            .name = try w.allocator.dupe(u8, tap), .dtype = try w.allocator.dupe(u8, dtype),
            .shape = try w.allocator.dupe(usize, shape), .whole = try w.allocator.dupe(usize, shape), .bytes = bytes,
        };
        part.last = part;
        var found = w.first;
        while (found) |other| : (found = other.next) if (std.mem.eql(u8, other.name, tap)) break;
        if (found) |head| return w.follow(head, part);
        if (w.newest) |before| before.next = part else w.first = part;
        w.newest = part;
    }

    fn follow(w: *TraceWriter, head: *Part, part: *Part) Error!void {
        const axis = rowAxis(head);
        var alike = std.mem.eql(u8, head.dtype, part.dtype) and head.shape.len == part.shape.len;
        for (part.shape, 0..) |dim, i| alike = alike and (i == axis or (axis == 1 and i == 2) or head.shape[i] == dim);
        if (!alike) return w.refuse("{s}: rows of another type or shape cannot follow those before", .{part.name});
        head.whole[axis] += part.shape[axis];
        if (axis == 1) head.whole[2] = @max(head.whole[2], part.shape[2]);
        head.last.more = part;
        head.last = part;
    }

    /// Write the file.
    pub fn end(w: *TraceWriter) Error!void {
        if (w.ended) return w.refuse("{s}: the trace has ended", .{w.path});
        if (w.reason_len > 0) return error.Refused;
        w.ended = true;
        const text = try w.header();
        const file = fopen(w.part, "wb") orelse return w.unwritten(w.part);
        var length: [8]u8 = undefined;
        std.mem.writeInt(u64, &length, text.len, .little);
        var good = put(file, &length) and put(file, text);
        var tap = w.first;
        while (tap) |head| : (tap = head.next) good = good and try w.writeTap(file, head);
        good = fclose(file) == 0 and good;
        if (!good) return w.unwritten(w.part);
        if (@import("builtin").os.tag == .windows) _ = remove(w.path); // rename replaces a file everywhere else
        if (rename(w.part, w.path) != 0) return w.unwritten(w.path);
    }

    /// Part below part, for each head; where a row is shorter than the longest, it is zero.
    fn writeTap(w: *TraceWriter, file: *CFile, head: *Part) Error!bool {
        const axis = rowAxis(head);
        const size = sizeOf(head.dtype).?;
        const zeros = try w.allocator.alloc(u8, product(head.whole[axis + 1 ..]) * size);
        @memset(zeros, 0);
        for (0..product(head.whole[0..axis])) |outer| {
            var next: ?*Part = head;
            while (next) |part| : (next = part.more) {
                const row = product(part.shape[axis + 1 ..]) * size;
                for (0..part.shape[axis]) |i| {
                    const start = (outer * part.shape[axis] + i) * row;
                    if (!put(file, part.bytes[start .. start + row]) or !put(file, zeros[row..])) return false;
                }
            }
        }
        return true;
    }

    fn header(w: *TraceWriter) Error![]const u8 {
        var info = Text{};
        const run = w.facts[0].buffer[0..w.facts[0].len];
        try w.append(&info, "{\"schema\":\"llamadiff.trace/1\",\"tokens\":[");
        try w.append(&info, w.tokens.buffer[0..w.tokens.len]);
        try w.append(&info, "]");
        try w.append(&info, run);
        if (w.n_tokens > w.n_prompt and std.mem.indexOf(u8, run, "\"n_prefill\":") == null)
            try w.print(&info, ",\"n_prefill\":{d}", .{w.n_prompt});
        try w.append(&info, ",\"producer\":{\"writer\":\"zig\"");
        try w.append(&info, w.facts[1].buffer[0..w.facts[1].len]);
        const openings = [_][]const u8{ ",\"settings\":{", ",\"hyperparameters\":{", "},\"model\":{" };
        for (w.facts[2..], openings, 0..) |fact, opening, i| {
            if (fact.len > 0) try w.append(&info, opening);
            if (fact.len > 0) try w.append(&info, fact.buffer[1..fact.len]);
            if (fact.len > 0 or i == 2) try w.append(&info, "}");
        }
        try w.append(&info, "}");
        var text = Text{};
        try w.append(&text, "{\"__metadata__\":{\"llamadiff\":");
        try w.quote(&text, info.buffer[0..info.len]); // JSON in a string of JSON
        try w.append(&text, "}");
        var at: usize = 0;
        var tap = w.first;
        while (tap) |head| : (tap = head.next) {
            const start = at;
            at += product(head.whole) * sizeOf(head.dtype).?;
            try w.append(&text, ",");
            try w.quote(&text, head.name);
            try w.print(&text, ":{s}\"dtype\":\"{s}\",\"shape\":[", .{ "{", head.dtype });
            for (head.whole, 0..) |dim, i| try w.print(&text, "{s}{d}", .{ if (i > 0) "," else "", dim });
            try w.print(&text, "],\"data_offsets\":[{d},{d}]{s}", .{ start, at, "}" });
        }
        try w.append(&text, "}");
        while (text.len % 8 != 0) try w.append(&text, " ");
        return text.buffer[0..text.len];
    }

    fn json(w: *TraceWriter, to: *Text, key: []const u8, value: anytype) Error!void {
        switch (@typeInfo(@TypeOf(value))) {
            .bool => try w.append(to, if (value) "true" else "false"),
            .int, .comptime_int => try w.print(to, "{d}", .{value}),
            .float, .comptime_float => {
                if (!std.math.isFinite(@as(f64, value))) return w.refuse("{s}: no number of JSON", .{key});
                try w.print(to, "{e}", .{@as(f64, value)});
            },
            else => {
                if (std.meta.Elem(@TypeOf(value)) == u8) return w.quote(to, value);
                for (value, 0..) |item, i| try w.print(to, "{s}{d}", .{ if (i > 0) "," else "[", item });
                try w.append(to, if (value.len > 0) "]" else "[]");
            },
        }
    }

    fn quote(w: *TraceWriter, to: *Text, text: []const u8) Error!void {
        try w.append(to, "\"");
        for (text) |c| {
            if (c < ' ') try w.print(to, "\\u{x:0>4}", .{c}) else {
                if (c == '"' or c == '\\') try w.append(to, "\\");
                try w.append(to, &.{c});
            }
        }
        try w.append(to, "\"");
    }

    fn print(w: *TraceWriter, to: *Text, comptime format: []const u8, values: anytype) Error!void {
        var buffer: [400]u8 = undefined;
        try w.append(to, std.fmt.bufPrint(&buffer, format, values) catch return error.OutOfMemory);
    }

    fn append(w: *TraceWriter, to: *Text, text: []const u8) Error!void {
        if (to.len + text.len > to.buffer.len) to.buffer = try w.allocator.realloc(to.buffer, 2 * (to.len + text.len));
        @memcpy(to.buffer[to.len .. to.len + text.len], text);
        to.len += text.len;
    }

    fn refuse(w: *TraceWriter, comptime format: []const u8, values: anytype) Error!void {
        const text = std.fmt.bufPrint(&w.reason, format, values) catch w.reason[0..];
        w.reason_len = text.len;
        return error.Refused;
    }

    fn unwritten(w: *TraceWriter, path: []const u8) Error!void {
        w.refuse("{s}: cannot be written ({s})", .{ path, @tagName(std.posix.errno(-1)) }) catch {};
        _ = remove(w.part);
        return error.Unwritten;
    }

    fn put(file: *CFile, bytes: []const u8) bool {
        return bytes.len == 0 or fwrite(bytes.ptr, 1, bytes.len, file) == bytes.len;
    }

    /// The axis of a tap that runs over tokens: [head, query, ...] has it second, whatever else is recorded first.
    fn rowAxis(part: *const Part) usize {
        for ([_][]const u8{ "kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-" }) |word| {
            if (part.shape.len == 3 and std.mem.startsWith(u8, part.name, word)) return 1;
        }
        return 0;
    }

    fn sizeOf(dtype: []const u8) ?usize {
        const types = [_][]const u8{ "F64", "F32", "F16", "BF16", "I32" };
        for (types, [_]usize{ 8, 4, 2, 2, 4 }) |word, size| if (std.mem.eql(u8, dtype, word)) return size;
        return null;
    }

    fn product(dims: []const usize) usize {
        var count: usize = 1;
        for (dims) |dim| count *= dim;
        return count;
    }

    fn joined(allocator: std.mem.Allocator, texts: []const []const u8) Error![:0]const u8 {
        const text = try std.mem.concat(allocator, u8, texts);
        const whole = try allocator.alloc(u8, text.len + 1);
        @memcpy(whole[0..text.len], text);
        whole[text.len] = 0;
        return whole[0..text.len :0];
    }
};
