// What common/json.cpp calls where an assertion fails: ggml's, which is not linked.
#include <cstdlib>

extern "C" void ggml_abort(const char *, int, const char *, ...) {
    std::abort();
}
