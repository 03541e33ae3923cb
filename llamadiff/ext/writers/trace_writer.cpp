// llamadiff's trace writer for C++17. SPDX-License-Identifier: MIT. Paste it anywhere.
//
// Records what an engine computes, its tensors ("taps"), in one .safetensors file:
//
//     TraceWriter trace("mine.safetensors", tokens);                  // the prompt's ids
//     trace.state("name", "my engine");                               // what is known of the run
//     trace.add("Qcur_rope-0", q.data(), {n_tokens, n_heads, head_dim});
//     trace.add_tokens({next});                                       // a decode step: its id,
//     trace.add("Qcur_rope-0", q.data(), {1, n_heads, head_dim});     // and its row below those before
//     trace.end();
//
// An error is an exception. Values are copied and kept in memory until the end. It writes path.part and renames it to
// path: a trace of before is replaced, and a run that breaks off leaves it as it was.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file is little-endian and this machine is not: swap the bytes of the values in add_as"
#endif

class TraceWriter {
public:
    using Shape = std::vector<int64_t>;

    // Begin the trace of a run of these tokens: the prompt's; those of decode steps may follow.
    TraceWriter(std::string path, const std::vector<int32_t> &tokens) : path_(std::move(path)), n_prompt_(tokens.size())
    {
        if (tokens.empty()) fail(path_, "the trace has no tokens");
        add_tokens(tokens);
    }

    // The ids that a decode step runs.
    void add_tokens(const std::vector<int32_t> &tokens)
    {
        for (const int32_t id : tokens) {
            const std::string place = std::to_string(tokens_.size());
            if (id < 0) fail(path_, "token " + place + " is " + std::to_string(id) + ", no token id");
            tokens_.push_back(id);
        }
    }

    // State what is known of the run: name, version, prompt, n_prefill (how many tokens were run in one go; the
    // prompt's, if not stated), positions, batches (how many ran at a time, if not one by one after the prompt),
    // settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn,
    // hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256.
    // A value is text, a number, a bool, or a vector of whole numbers.
    template <class T> void state(const std::string &key, const T &value)
    {
        static const std::set<std::string> run{"prompt", "n_prefill", "positions", "batches"};
        static const std::set<std::string> producer{"name", "version"};
        static const std::set<std::string> groups{"settings", "hyperparameters", "model"};
        const auto dot = key.find('.');
        const bool plain = run.count(key) || producer.count(key);
        const std::string group = run.count(key) ? "run" : plain ? "producer" : key.substr(0, dot);
        if (!plain && (dot == std::string::npos || !groups.count(group))) fail(key, "nothing is stated by that name");
        if (!facts_[group].emplace(plain ? key : key.substr(dot + 1), json(value)).second) fail(key, "stated twice");
    }

    // Add the rows of a tap: values without gaps (C order) and dims, outermost first. Rows that are added under the
    // same name go below those before; scores may see more keys each time, and keys not yet seen are zero.
    template <class T> void add(const std::string &name, const T *values, const Shape &shape)
    {
        static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "other types: add_as");
        add_as(name, std::is_same_v<T, float> ? "F32" : "F64", values, shape);
    }

    // The same for a type that C++ has no word for: F16 or BF16 (their bits), I32, F32, F64.
    void add_as(const std::string &name, const std::string &dtype, const void *values, const Shape &shape)
    {
        static const std::map<std::string, size_t> sizes{{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I32", 4}};
        if (ended_) fail(path_, "the trace has ended");
        if (!sizes.count(dtype)) fail(name, "type " + dtype + "; F64, F32, F16, BF16 and I32 are possible");
        if (name.empty() || name == "__metadata__") fail('"' + name + '"', "is no name of a tap");
        size_t size = sizes.at(dtype);
        bool good = !shape.empty() && shape.size() <= 8;
        for (const int64_t dim : shape) {
            good = good && dim >= 1 && dim <= PTRDIFF_MAX / int64_t(size);
            size *= good ? size_t(dim) : 1;
        }
        if (!good) fail(name, "shape " + json(shape) + "; 1 to 8 dims of at least 1 are possible");
        if (!taps_.count(name)) order_.push_back(name);
        Tap &tap = taps_.try_emplace(name, Tap{dtype, sizes.at(dtype), shape, {}}).first->second;
        const size_t axis = row_axis(name, shape);
        Shape whole = tap.shape;
        bool fits = tap.dtype == dtype && whole.size() == shape.size();
        for (size_t i = 0; fits && i < shape.size(); i++)
            fits = i == axis || (axis == 1 && i == 2) || whole[i] == shape[i];
        if (!fits) fail(name, "rows of another type or shape cannot follow those before");
        whole[axis] = shape[axis] + (tap.parts.empty() ? 0 : whole[axis]);
        if (axis == 1) whole[2] = std::max(whole[2], shape[2]);
        const char *bytes = static_cast<const char *>(values);
        tap.parts.push_back({shape, std::vector<char>(bytes, bytes + size)});
        tap.shape = whole;
    }

    // Write the file.
    void end()
    {
        if (std::exchange(ended_, true)) fail(path_, "the trace has ended");
        const std::string text = header(), part = path_ + ".part";
        std::error_code error;
        std::ofstream file(part, std::ios::binary);
        for (int i = 0; i < 8; i++) file.put(char(uint64_t(text.size()) >> 8 * i));
        file << text;
        for (const std::string &name : order_) write(file, taps_.at(name), row_axis(name, taps_.at(name).shape));
        file.close();
        const bool written = !file.fail();
        if (written) std::filesystem::rename(part, path_, error);
        if (written && !error) return;
        const std::string reason = written ? error.message() : std::generic_category().message(errno);
        std::filesystem::remove(part, error);
        fail(written ? path_ : part, "cannot be written (" + reason + ")");
    }

private:
    struct Part { Shape shape; std::vector<char> bytes; };
    struct Tap { std::string dtype; size_t size; Shape shape; std::vector<Part> parts; };

    [[noreturn]] static void fail(const std::string &what, const std::string &why)
    {
        throw std::runtime_error(what + ": " + why);
    }

    // The axis of a tap that runs over tokens: [head, query, ...] has it second, whatever else is recorded first.
    static size_t row_axis(const std::string &name, const Shape &shape)
    {
        for (const char *word : {"kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-"})
            if (shape.size() == 3 && name.rfind(word, 0) == 0) return 1;
        return 0;
    }

    static size_t product(const Shape &shape, size_t from, size_t to)
    {
        size_t product = 1;
        for (size_t i = from; i < to; i++) product *= size_t(shape[i]);
        return product;
    }

    // Part below part, for each head; where a row is shorter than the longest, it is zero.
    static void write(std::ofstream &file, const Tap &tap, size_t axis)
    {
        const size_t n = tap.shape.size(), longest = product(tap.shape, axis + 1, n) * tap.size;
        for (size_t head = 0; head < product(tap.shape, 0, axis); head++)
            for (const Part &part : tap.parts) {
                const size_t row = product(part.shape, axis + 1, n) * tap.size, rows = size_t(part.shape[axis]);
                const std::string zeros(longest - row, '\0');
                for (size_t i = 0; i < rows; i++)
                    file.write(part.bytes.data() + (head * rows + i) * row, std::streamsize(row)) << zeros;
            }
    }

    template <class T> static std::string json(const T &value)
    {
        std::ostringstream out;
        if constexpr (std::is_same_v<T, bool>) {
            out << (value ? "true" : "false");
        } else if constexpr (std::is_arithmetic_v<T>) {
            if (!std::isfinite(double(value))) fail(std::to_string(value), "is no number of JSON");
            out.precision(17);
            out << +value;
        } else if constexpr (std::is_convertible_v<T, std::string>) {
            for (const char c : std::string(value)) {
                char escaped[8];
                std::snprintf(escaped, sizeof escaped, "\\u%04x", unsigned(c) & 0xff);
                if (static_cast<unsigned char>(c) < ' ') out << escaped;
                else out << (c == '"' || c == '\\' ? "\\" : "") << c;
            }
            return '"' + out.str() + '"';
        } else {
            for (const auto &item : value) out << (out.tellp() > 0 ? "," : "") << json(item);
            return '[' + out.str() + ']';
        }
        return out.str();
    }

    // ,"key":value for each fact of a group
    std::string facts(const std::string &group) const
    {
        std::string out;
        if (const auto found = facts_.find(group); found != facts_.end())
            for (const auto &[key, value] : found->second) out += "," + json(key) + ":" + value;
        return out;
    }

    std::string object(const std::string &group) const
    {
        const std::string inner = facts(group);
        return inner.empty() ? "" : ",\"" + group + "\":{" + inner.substr(1) + "}";
    }

    std::string header() const
    {
        std::string run = facts("run");
        if (tokens_.size() > n_prompt_ && run.find("\"n_prefill\":") == std::string::npos)
            run += ",\"n_prefill\":" + std::to_string(n_prompt_);
        const std::string producer = facts("producer") + object("settings") + object("hyperparameters");
        const std::string info = "{\"schema\":\"llamadiff.trace/1\",\"tokens\":" + json(tokens_) + run +
                                 ",\"producer\":{\"writer\":\"cpp\"" + producer + "}" + object("model") + "}";
        std::string text = "{\"__metadata__\":{\"llamadiff\":" + json(info) + "}"; // JSON in a string of JSON
        size_t end = 0;
        for (const std::string &name : order_) {
            const Tap &tap = taps_.at(name);
            const size_t start = end;
            end += product(tap.shape, 0, tap.shape.size()) * tap.size;
            text += "," + json(name) + ":{\"dtype\":\"" + tap.dtype + "\",\"shape\":" + json(tap.shape) +
                    ",\"data_offsets\":" + json(std::vector<size_t>{start, end}) + "}";
        }
        text += "}";
        return text + std::string((8 - text.size() % 8) % 8, ' ');
    }

    std::string path_;
    size_t n_prompt_;
    bool ended_ = false;
    std::vector<int32_t> tokens_;
    std::map<std::string, std::map<std::string, std::string>> facts_;
    std::map<std::string, Tap> taps_;
    std::vector<std::string> order_;
};
