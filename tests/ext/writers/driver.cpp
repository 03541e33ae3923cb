// driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file; see test_writers.py.
#include "trace_writer.cpp"

#include <iostream>
#include <iterator>

static std::vector<std::string> split(const std::string &text, const char *marks)
{
    std::vector<std::string> parts;
    for (size_t start = 0, end; start <= text.size(); start = end + 1) {
        end = std::min(text.find_first_of(marks, start), text.size());
        parts.push_back(text.substr(start, end - start));
    }
    return parts;
}

template <class T> static std::vector<T> numbers(const std::string &text)
{
    std::vector<T> out;
    for (const std::string &word : split(text, "x,"))
        if (!word.empty()) out.push_back(T(std::stoll(word)));
    return out;
}

static void lines(TraceWriter &trace)
{
    const int64_t n_tokens = 2, n_keys = 2;
    /* LINES */
    (void)trace, (void)n_tokens, (void)n_keys;
}

static void run(char **argv)
{
    std::ifstream file(argv[3], std::ios::binary), script(argv[4]);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const char *next = bytes.data();
    TraceWriter trace(argv[1], numbers<int32_t>(argv[2]));
    for (std::string line; std::getline(script, line);) {
        const auto parts = split(line, "\t");
        if (parts[0] == "text") trace.state(parts[1], parts[2]);
        if (parts[0] == "number" && parts[2].find_first_of(".e") == std::string::npos) trace.state(parts[1], std::stoi(parts[2]));
        else if (parts[0] == "number") trace.state(parts[1], std::stod(parts[2]));
        if (parts[0] == "flag") trace.state(parts[1], parts[2] == "true");
        if (parts[0] == "list") trace.state(parts[1], numbers<int>(parts[2]));
        if (parts[0] == "tokens") trace.add_tokens(numbers<int32_t>(parts[1]));
        if (parts[0] == "abort") std::abort();
        if (parts[0] == "end") trace.end();
        if (parts[0] == "lines") lines(trace);
        if (parts[0] != "add") continue;
        const auto shape = numbers<int64_t>(parts[2]);
        int64_t size = parts[1] == "F64" ? 8 : parts[1] == "F32" || parts[1] == "I32" ? 4 : 2;
        if (parts[1] == "F32") trace.add(parts[3], reinterpret_cast<const float *>(next), shape);
        else if (parts[1] == "F64") trace.add(parts[3], reinterpret_cast<const double *>(next), shape);
        else trace.add_as(parts[3], parts[1], next, shape);
        for (const int64_t dim : shape) size *= dim;
        next += size;
    }
}

int main(int, char **argv)
{
    try {
        run(argv);
    } catch (const std::exception &error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
