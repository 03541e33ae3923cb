// Put before a program's own libraries (LD_PRELOAD), this takes the place of ggml's functions that compute a graph, and
// writes down what some graphs' nodes read and gave: files in a folder, which llamadiff's process judges (watching.py).
//
// It knows no structure of ggml's: where tensors have their fields it is told (layout.py), in answer to the path of the
// ggml at hand. All else are ggml's own functions. A graph that is not watched is passed on as it is.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#ifdef __linux__
#include <link.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define VERSION 1
#define SOURCES 16  // more than any ggml has of one node
#define PART (128ull << 20)  // bytes after which a new file begins
#define BUFFER (1u << 19)  // bytes that are written at once
#define SMALL (1ull << 20)  // bytes of memory that a view of it is told of with its values
#define WEIGHTS 1  // GGML_BACKEND_BUFFER_USAGE_WEIGHTS
#define ROOM 64  // payloads begin at multiples of it

// ---- what llamadiff's process and this share (Plan in watching.py) ------------------------------------------------

struct plan {
    uint64_t version;
    int64_t judge;  // its process
    int64_t from, to, first, every;  // graphs, counted from 1; to 0: no range
    uint64_t most, weights, large;  // bytes: that may wait, of weights in all, of one node
    char nodes[256];
    uint64_t seen, watched, put_off, partial, failed;  // graphs
    uint64_t nodes_large, nodes_cut, written, judged, kept;  // nodes that were left out, judged in part; bytes
    uint64_t added;  // nanoseconds that watching took
};

enum { DEVICE, HOST, HIDDEN };  // where values are
enum { HEAD, TENSOR, DATA, WEIGHT, LACKING, NODE, LARGE, RESULT, END };

struct chunk {
    uint32_t kind, where;
    uint64_t size, at, a, b;
    char filler[24];
};

struct described {  // behind a tensor's own bytes
    char op[32], word[32], type[24];
    uint64_t block, block_bytes, bytes;
};

struct layout {
    uint64_t type, buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data, name, size, sources;
    uint64_t computed;  // the flag of nodes that are computed; 0: all are
};

// ---- one ggml of the program's ------------------------------------------------------------------------------------

typedef bool (*eval)(void * node, bool ask, void * user);

struct params {
    size_t size;
    void * memory;
    bool no_alloc;
};

#define FUNCTIONS(F) \
    F(int, ggml_backend_sched_graph_compute, (void *, void *)) \
    F(int, ggml_backend_sched_graph_compute_async, (void *, void *)) \
    F(void, ggml_backend_sched_synchronize, (void *)) \
    F(void, ggml_backend_sched_set_eval_callback, (void *, eval, void *)) \
    F(void, ggml_backend_sched_free, (void *)) \
    F(int, ggml_backend_graph_compute, (void *, void *)) \
    F(int, ggml_backend_graph_compute_async, (void *, void *)) \
    F(int, ggml_graph_compute, (void *, void *)) \
    F(int, ggml_graph_n_nodes, (void *)) \
    F(void *, ggml_graph_node, (void *, int)) \
    F(void *, ggml_init, (struct params)) \
    F(void, ggml_free, (void *)) \
    F(size_t, ggml_graph_overhead_custom, (size_t, bool)) \
    F(void *, ggml_new_graph_custom, (void *, size_t, bool)) \
    F(void, ggml_graph_clear, (void *)) \
    F(void, ggml_graph_add_node, (void *, void *)) \
    F(const char *, ggml_op_desc, (const void *)) \
    F(const char *, ggml_op_name, (int)) \
    F(const char *, ggml_type_name, (int)) \
    F(size_t, ggml_type_size, (int)) \
    F(int64_t, ggml_blck_size, (int)) \
    F(size_t, ggml_nbytes, (const void *)) \
    F(bool, ggml_is_contiguous, (const void *)) \
    F(bool, ggml_backend_buffer_is_host, (void *)) \
    F(int, ggml_backend_buffer_get_usage, (void *)) \
    F(void *, ggml_backend_buffer_get_type, (void *)) \
    F(void *, ggml_backend_buft_get_device, (void *)) \
    F(int, ggml_backend_dev_type, (void *)) \
    F(void, ggml_backend_tensor_get, (const void *, void *, size_t, size_t)) \
    F(void, ggml_backend_tensor_set, (void *, const void *, size_t, size_t))

struct ggml {
    void * caller;  // the library that called
#define POINTER(result, name, arguments) result (*name) arguments;
    FUNCTIONS(POINTER)
#undef POINTER
    int number;  // of its layout; -1: not asked yet
    bool readable;
    struct layout at;
    char path[1024];
};

// Without these no graph can be written down.
#define NEEDED(F) \
    F(ggml_graph_n_nodes) F(ggml_graph_node) F(ggml_op_desc) F(ggml_op_name) F(ggml_type_name) F(ggml_type_size) \
    F(ggml_blck_size) F(ggml_nbytes) F(ggml_is_contiguous) F(ggml_backend_buffer_is_host) \
    F(ggml_backend_buffer_get_usage) F(ggml_backend_tensor_get) F(ggml_backend_sched_synchronize)

#define MOST_GGMLS 32
static struct ggml ggmls[MOST_GGMLS];
static int n_ggmls, n_layouts;
static struct plan * plan;
static char folder[1024];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int inside;  // a graph is computed by this thread already: what ggml calls of itself is no other

static void begin(void) {
    const char * place = getenv("LLAMADIFF_WATCH");
    if (place == NULL || strlen(place) > sizeof(folder) - 64) {
        return;
    }
    strcpy(folder, place);
    char path[1100];
    snprintf(path, sizeof(path), "%s/plan", folder);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        return;
    }
    struct plan * found = mmap(NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED && found->version == VERSION) {
        plan = found;
    }
}

static bool judge_lives(void) {
    return kill((pid_t) plan->judge, 0) == 0 || errno == EPERM;
}

static void add(uint64_t * counter, uint64_t more) {
    __atomic_fetch_add(counter, more, __ATOMIC_SEQ_CST);
}

static uint64_t of(const uint64_t * counter) {
    return __atomic_load_n(counter, __ATOMIC_SEQ_CST);
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t) time.tv_sec * 1000000000ull + (uint64_t) time.tv_nsec;
}

static void pause_ms(long ms) {
    const struct timespec time = { 0, ms * 1000000 };
    nanosleep(&time, NULL);
}

// The function of this name in a library, or in what it needs; none that this file puts in its place.
static void * within(void * library, const char * name) {
    void * found = dlsym(library, name);
    Dl_info there, here;
    const bool is_own = found != NULL && dladdr(found, &there) && dladdr((void *) &plan, &here)
        && there.dli_fbase == here.dli_fbase;
    return is_own ? NULL : found;
}

#ifdef __linux__
struct names {
    char at[256][512];
    int count;
};

static int note_name(struct dl_phdr_info * info, size_t size, void * user) {
    struct names * names = user;
    (void) size;
    if (names->count < 256 && info->dlpi_name[0] != 0 && strlen(info->dlpi_name) < 512) {
        strcpy(names->at[names->count++], info->dlpi_name);
    }
    return 0;
}
#endif

// The function of this name in whatever library the program has loaded: who called was called by a jump.
static void * anywhere(const char * name) {
    void * found = NULL;
#ifdef __linux__
    static struct names names;  // the lock is held
    names.count = 0;
    dl_iterate_phdr(note_name, &names);
    for (int i = 0; i < names.count && found == NULL; i++) {
        void * library = dlopen(names.at[i], RTLD_LAZY | RTLD_NOLOAD);
        found = library != NULL ? within(library, name) : NULL;
    }
#endif
    return found;
}

// The function that was meant: of the library that called, or of what it needs; else that of whoever comes next.
static void * meant(void * library, const char * name) {
    void * found = library != NULL ? within(library, name) : NULL;
    return found != NULL ? found : within(RTLD_NEXT, name);
}

static struct ggml * ggml_of(void * place);

// ---- where tensors have their fields ------------------------------------------------------------------------------

static void * field(const struct ggml * g, const void * tensor, uint64_t offset) {
    (void) g;
    return (char *) tensor + offset;
}
#define AT(kind, tensor, name) (*(kind *) field(g, tensor, g->at.name))

static bool answered(struct ggml * g, const char * told) {
    FILE * file = fopen(told, "rb");
    if (file == NULL) {
        return false;
    }
    g->readable = fread(&g->at, sizeof(g->at), 1, file) == 1 && g->at.size > 0 && g->at.sources <= SOURCES;
    fclose(file);
    return true;
}

// A function of this ggml's, by which its library is found.
static void * anything_of(const struct ggml * g) {
    void * found = NULL;
#define FIRST(name) found = found != NULL ? found : (void *) g->name;
    NEEDED(FIRST)
#undef FIRST
    return found != NULL ? found : (void *) g->ggml_graph_compute;
}

// The first function that it lacks; "" if it has all.
static const char * lacking(const struct ggml * g) {
    const char * found = "";
#define FIRST(name) found = *found == 0 && g->name == NULL ? #name : found;
    NEEDED(FIRST)
#undef FIRST
    return found;
}

// Ask for the layout of this ggml, once for each library; the lock is held.
static bool is_readable(struct ggml * g) {
    if (g->number >= 0) {
        return g->readable;
    }
    Dl_info base, cpu;
    if (!dladdr(anything_of(g), &base)) {
        g->number = 0;
        return false;
    }
    for (int i = 0; i < n_ggmls; i++) {
        if (ggmls[i].number > 0 && strcmp(ggmls[i].path, base.dli_fname) == 0) {
            g->number = ggmls[i].number, g->readable = ggmls[i].readable, g->at = ggmls[i].at;
            snprintf(g->path, sizeof(g->path), "%s", base.dli_fname);
            return g->readable;
        }
    }
    snprintf(g->path, sizeof(g->path), "%s", base.dli_fname);
    char asked[1100], told[1100], part[1200];
    g->number = ++n_layouts;
    snprintf(asked, sizeof(asked), "%s/ask-%d-%d", folder, (int) getpid(), g->number);
    snprintf(told, sizeof(told), "%s/told-%d-%d", folder, (int) getpid(), g->number);
    snprintf(part, sizeof(part), "%s.part", asked);
    FILE * file = fopen(part, "wb");
    if (file == NULL) {
        return false;
    }
    char * whole = realpath(base.dli_fname, NULL);
    const bool has_cpu = g->ggml_graph_compute != NULL && dladdr((void *) g->ggml_graph_compute, &cpu);
    char * whole_cpu = has_cpu ? realpath(cpu.dli_fname, NULL) : NULL;
    fprintf(file, "%s\n%s\n%s\n", whole ? whole : base.dli_fname, whole_cpu ? whole_cpu : "", lacking(g));
    free(whole);
    free(whole_cpu);
    fclose(file);
    if (rename(part, asked) != 0) {
        return false;
    }
    while (!answered(g, told)) {
        if (!judge_lives()) {
            return false;
        }
        pause_ms(1);
    }
    return g->readable;
}

// ---- which graphs are watched -------------------------------------------------------------------------------------

#define SHAPES 8192
static uint64_t shapes[SHAPES];
static bool taken[SHAPES];

// A number for what a graph is: its ops, their types, and how many bits their sizes have.
static uint64_t shape_of(const struct ggml * g, void * graph) {
    const int count = g->ggml_graph_n_nodes(graph);
    uint64_t hash = 1469598103934665603ull;
    for (int i = 0; i < count; i++) {
        void * node = g->ggml_graph_node(graph, i);
        uint64_t word = ((uint64_t) AT(int, node, op) << 8) ^ (uint64_t) AT(int, node, type);
        for (int axis = 0; axis < 4; axis++) {
            const uint64_t size = (uint64_t) (&AT(int64_t, node, ne))[axis];
            word = word << 8 ^ (size ? 64 - (uint64_t) __builtin_clzll(size) : 0);
        }
        hash = (hash ^ word) * 1099511628211ull;
        hash ^= hash >> 29;
    }
    return hash ? hash : 1;
}

static bool * taken_of(uint64_t shape) {
    for (uint64_t i = 0; i < 64; i++) {
        const uint64_t place = (shape + i) % SHAPES;
        if (shapes[place] == 0) {
            shapes[place] = shape;
        }
        if (shapes[place] == shape) {
            return &taken[place];
        }
    }
    return NULL;  // more shapes than there is room for: none of these is new
}

static bool is_behind(void) {
    return of(&plan->written) > of(&plan->judged) + plan->most;
}

// Wait until there is room for more; false if nobody judges any more.
static bool has_room(void) {
    while (is_behind()) {
        if (!judge_lives()) {
            return false;
        }
        pause_ms(2);
    }
    return true;
}

// Whether a graph is one to watch; its number.
static bool is_wanted(struct ggml * g, void * graph, uint64_t * number) {
    const uint64_t n = __atomic_add_fetch(&plan->seen, 1, __ATOMIC_SEQ_CST);
    *number = n;
    if (plan->to > 0 && ((int64_t) n < plan->from || (int64_t) n > plan->to)) {
        return false;
    }
    pthread_mutex_lock(&lock);
    bool wanted = false;
    if (!is_readable(g)) {
        add(&plan->failed, 1);
    } else if (plan->to > 0) {
        wanted = true;
    } else {
        bool * is_taken = taken_of(shape_of(g, graph));
        const bool is_new = is_taken != NULL && !*is_taken;
        const bool must = (int64_t) n <= plan->first || plan->every == 1;
        wanted = must || is_new || (plan->every > 0 && n % (uint64_t) plan->every == 0);
        if (wanted && !must && is_behind()) {  // another of this shape will come
            add(&plan->put_off, 1);
            wanted = false;
        }
        if (wanted && is_taken != NULL) {
            *is_taken = true;
        }
    }
    pthread_mutex_unlock(&lock);
    const uint64_t start = now();
    wanted = wanted && judge_lives() && has_room();
    add(&plan->added, now() - start);
    return wanted;
}

// ---- one graph that is watched ------------------------------------------------------------------------------------

// Of a large memory into which a node writes some rows (SET_ROWS): those from the first to the last of them, and one
// more on either side. It is told of as if it were all there is: what is written elsewhere is not seen.
struct window {
    const void * written, * into, * ids;  // the node, the source that it is a view of, the numbers of rows
    int64_t first, count;
};

// Of a node that is too large: a range of its rows along an axis, and of its sources what these need; it is told of as
// if it were all there is. Row i reads rows i * step + shift to i * step + shift + span - 1 of a source.
struct cut {
    void * tensor;
    int axis;
    int64_t step, shift, span, first, count;
};

struct watch {
    struct ggml * g;
    FILE * file;
    char path[1100];
    uint64_t number, bytes, start;
    int part;
    bool given, failed;  // this node is handed over; nothing can be written any more
    eval theirs;
    void * user;
    bool they_want;
    struct window window;
    struct cut cuts[1 + SOURCES];
    int n_cuts;
    bool inner;  // what is cut touches no edge: no padding
};

static void raw(struct watch * w, const void * data, size_t size) {
    if (!w->failed && size > 0 && fwrite(data, 1, size, w->file) != size) {
        w->failed = true;
    }
}

static void put(struct watch * w, struct chunk head, const void * data) {
    static const char zeros[ROOM];
    if (w->failed || w->file == NULL) {
        return;
    }
    raw(w, &head, sizeof(head));
    if (head.size > 0) {
        raw(w, data, head.size);
        raw(w, zeros, (ROOM - head.size % ROOM) % ROOM);
    }
    w->bytes += sizeof(head) + (head.size + ROOM - 1) / ROOM * ROOM;
}

static void open_part(struct watch * w) {
    snprintf(w->path, sizeof(w->path), "%s/graph-%d-%llu-%d", folder, (int) getpid(), (unsigned long long) w->number,
             w->part++);
    char part[1200];
    snprintf(part, sizeof(part), "%s.part", w->path);
    static __thread char * buffer;
    buffer = buffer != NULL ? buffer : malloc(BUFFER);
    w->file = fopen(part, "wb");
    w->failed = w->failed || w->file == NULL;
    if (w->file != NULL && buffer != NULL) {
        setvbuf(w->file, buffer, _IOFBF, BUFFER);
    }
    w->bytes = 0;
    struct chunk head = { .kind = HEAD, .at = (uint64_t) w->g->number, .a = w->number, .b = (uint64_t) getpid() };
    put(w, head, NULL);
}

static void close_part(struct watch * w) {
    char part[1200];
    snprintf(part, sizeof(part), "%s.part", w->path);
    if (w->file != NULL && fclose(w->file) != 0) {
        w->failed = true;
    }
    w->file = NULL;
    if (w->failed || !judge_lives()) {
        w->failed = true;
        unlink(part);
        return;
    }
    add(&plan->written, w->bytes);
    rename(part, w->path);
}

// Whether a memory of the CPU's keeps what is put there in a form of its own (repacked, AMX), and gives nothing back.
static bool is_hidden(const struct ggml * g, void * buffer) {
    if (buffer == NULL || g->ggml_backend_buffer_is_host(buffer) || g->ggml_backend_buffer_get_type == NULL
        || g->ggml_backend_buft_get_device == NULL || g->ggml_backend_dev_type == NULL) {
        return false;
    }
    void * device = g->ggml_backend_buft_get_device(g->ggml_backend_buffer_get_type(buffer));
    return device != NULL && g->ggml_backend_dev_type(device) == 0;  // GGML_BACKEND_DEVICE_TYPE_CPU
}

// A tensor's bytes: its own, or fetched from a device into memory that is to be freed.
static const void * bytes_of(const struct ggml * g, void * tensor, size_t size, void ** fetched) {
    void * buffer = AT(void *, tensor, buffer);
    *fetched = NULL;
    if (buffer == NULL || g->ggml_backend_buffer_is_host(buffer)) {
        return AT(void *, tensor, data);
    }
    if (is_hidden(g, buffer)) {
        return NULL;
    }
    *fetched = malloc(size);
    if (*fetched != NULL) {
        g->ggml_backend_tensor_get(tensor, *fetched, 0, size);
    }
    return *fetched;
}

static bool is_leaf(const struct ggml * g, void * tensor) {
    return AT(int, tensor, op) == 0 && AT(void *, tensor, view_src) == NULL;
}

static bool is_weight(const struct ggml * g, void * tensor) {
    void * buffer = AT(void *, tensor, buffer);
    return is_leaf(g, tensor) && buffer != NULL && g->ggml_backend_buffer_get_usage(buffer) == WEIGHTS
        && g->ggml_is_contiguous(tensor);
}

static bool is_windowed(const struct watch * w, const void * tensor) {
    return tensor != NULL && (tensor == w->window.written || tensor == w->window.into);
}

static size_t bytes_in(const struct watch * w, void * tensor) {
    const struct ggml * g = w->g;
    return (size_t) w->window.count * (&AT(size_t, tensor, nb))[1];
}

// ---- parts of nodes that are too large ----------------------------------------------------------------------------

static int64_t size_at(const struct ggml * g, const void * tensor, int axis) {
    return (&AT(int64_t, tensor, ne))[axis];
}

static const struct cut * cut_of(const struct watch * w, const void * tensor) {
    for (int i = 0; i < w->n_cuts; i++) {
        if (w->cuts[i].tensor == tensor) {
            return &w->cuts[i];
        }
    }
    return NULL;
}

// How a part of a tensor lies in one piece: sizes, and steps in bytes -> bytes in all.
static uint64_t in_one_piece(
    const struct ggml * g, const void * tensor, const struct cut * cut, int64_t * ne, uint64_t * nb
) {
    const int type = AT(int, tensor, type);
    for (int axis = 0; axis < 4; axis++) {
        ne[axis] = axis == cut->axis ? cut->count : size_at(g, tensor, axis);
    }
    nb[0] = g->ggml_type_size(type);
    nb[1] = nb[0] * (uint64_t) (ne[0] / g->ggml_blck_size(type));
    nb[2] = nb[1] * (uint64_t) ne[1];
    nb[3] = nb[2] * (uint64_t) ne[2];
    return nb[3] * (uint64_t) ne[3];
}

// That part in a memory of its own, which is to be freed.
static char * cut_out(
    const struct ggml * g, void * tensor, const struct cut * cut, const char * data, uint64_t * size
) {
    int64_t ne[4];
    uint64_t nb[4];
    *size = in_one_piece(g, tensor, cut, ne, nb);
    const size_t * from = &AT(size_t, tensor, nb);
    char * made = malloc(*size);
    const uint64_t start = (uint64_t) cut->first * from[cut->axis];
    for (int64_t i3 = 0; made != NULL && i3 < ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < ne[1]; i1++) {
                const uint64_t at[3] = { (uint64_t) i1, (uint64_t) i2, (uint64_t) i3 };
                const char * row = data + start + at[0] * from[1] + at[1] * from[2] + at[2] * from[3];
                char * to = made + at[0] * nb[1] + at[1] * nb[2] + at[2] * nb[3];
                if (from[0] == nb[0]) {
                    memcpy(to, row, nb[1]);
                    continue;
                }
                for (int64_t i0 = 0; i0 < ne[0]; i0++) {
                    memcpy(to + (uint64_t) i0 * nb[0], row + (uint64_t) i0 * from[0], nb[0]);
                }
            }
        }
    }
    return made;
}

static const char * const row_by_row[] = {
    "ADD", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG", "SIN", "COS", "NORM", "RMS_NORM", "L2_NORM", "SCALE", "CLAMP",
    "LEAKY_RELU", "UNARY", "GLU", "CUMSUM", "SOFT_MAX", "DUP", "CPY", "CONT", NULL
};
static const char * const copies[] = { "DUP", "CPY", "CONT", NULL };
static const char * const by_kernel[] = { "IM2COL", "CONV_2D", "CONV_2D_DW", NULL };

static bool is_one_of(const char * word, const char * const * words) {
    while (*words != NULL && strcmp(word, *words) != 0) {
        words++;
    }
    return *words != NULL;
}

static void add_cut(struct watch * w, void * tensor, int axis, int64_t step, int64_t shift, int64_t span) {
    w->cuts[w->n_cuts++] = (struct cut) { tensor, axis, step, shift, span, 0, 0 };
}

// Take as many rows as are not too large, somewhere else in each graph; false if there are none.
static bool is_cut(struct watch * w, void * node, uint64_t whole) {
    const struct ggml * g = w->g;
    int64_t low = 0, high = size_at(g, node, w->cuts[0].axis) - 1;
    uint64_t by_row = 0, once = 0, others = whole;
    for (int i = 0; i < w->n_cuts; i++) {
        struct cut * cut = &w->cuts[i];
        const int64_t there = size_at(g, cut->tensor, cut->axis);
        if (there < 1 || cut->step < 1 || (cut->axis == 0 && g->ggml_blck_size(AT(int, cut->tensor, type)) != 1)) {
            return false;
        }
        const int64_t least = (-cut->shift + cut->step - 1) / cut->step;
        const int64_t most = (there - cut->span - cut->shift) / cut->step;
        low = cut->shift < 0 && least > low ? least : low;
        high = there < cut->span + cut->shift ? -1 : most < high ? most : high;
        int64_t ne[4];
        uint64_t nb[4];
        cut->count = 1;
        const uint64_t row = in_one_piece(g, cut->tensor, cut, ne, nb), all = g->ggml_nbytes(cut->tensor);
        by_row += row * (uint64_t) cut->step, once += row * (uint64_t) (cut->span - cut->step);
        others -= all < others ? all : others;
    }
    const int64_t rows = high - low + 1;
    if (rows < 1 || others + once + by_row > plan->large) {
        return false;
    }
    const uint64_t room = (plan->large - others - once) / by_row;
    const int64_t count = room < (uint64_t) rows ? (int64_t) room : rows;
    const uint64_t where = (w->number * 2654435761u + w->bytes) * 11400714819323198485ull >> 33;
    const int64_t first = low + (int64_t) (where % (uint64_t) (rows - count + 1));
    for (int i = 0; i < w->n_cuts; i++) {
        struct cut * cut = &w->cuts[i];
        cut->first = first * cut->step + cut->shift;
        cut->count = (count - 1) * cut->step + cut->span;
    }
    return true;
}

// Each source along the node's own axis, as far as it runs along that.
static bool cut_row_by_row(struct watch * w, void * node, uint64_t whole, int axis, bool is_copy) {
    const struct ggml * g = w->g;
    const void * first = AT(void *, node, src);
    w->n_cuts = 0;
    for (int each = 0; is_copy && each < 4; each++) {
        if (size_at(g, node, each) != size_at(g, first, each)) {
            return false;
        }
    }
    if (size_at(g, node, axis) < 2) {
        return false;
    }
    add_cut(w, node, axis, 1, 0, 1);
    for (uint64_t i = 0; i < g->at.sources; i++) {
        void * source = (&AT(void *, node, src))[i];
        if (source == NULL || size_at(g, source, axis) == 1 || cut_of(w, source) != NULL) {
            continue;
        }
        if (size_at(g, source, axis) != size_at(g, node, axis) || is_weight(g, source)) {
            return false;
        }
        add_cut(w, source, axis, 1, 0, 1);
    }
    return is_cut(w, node, whole);
}

static bool cut_product(struct watch * w, void * node, uint64_t whole, int which) {
    const struct ggml * g = w->g;
    void * source = (&AT(void *, node, src))[which];
    w->n_cuts = 0;
    if (is_weight(g, source) || (&AT(void *, node, src))[0] == (&AT(void *, node, src))[1]) {
        return false;
    }
    add_cut(w, node, which, 1, 0, 1);
    add_cut(w, source, 1, 1, 0, 1);
    return is_cut(w, node, whole);
}

// Rows of a picture that a kernel of some height passes over, away from the edges.
static bool cut_by_kernel(struct watch * w, void * node, uint64_t whole, bool is_columns) {
    const struct ggml * g = w->g;
    void * kernel = (&AT(void *, node, src))[0], * picture = (&AT(void *, node, src))[1];
    const int32_t * numbers = &AT(int32_t, node, op_params);  // strides, paddings, dilations; whether by two axes
    w->n_cuts = 0;
    if (kernel == NULL || picture == NULL || (is_columns && numbers[6] != 1) || is_weight(g, picture)) {
        return false;
    }
    add_cut(w, node, is_columns ? 2 : 1, 1, 0, 1);
    add_cut(w, picture, 1, numbers[1], -numbers[3], (size_at(g, kernel, 1) - 1) * numbers[5] + 1);
    w->inner = true;
    return is_cut(w, node, whole);
}

// Whether a SOFT_MAX has nothing of each head's own: no ALiBi, no sinks.
static bool is_without_heads(const struct ggml * g, void * node) {
    return (&AT(float, node, op_params))[1] == 0 && (&AT(void *, node, src))[2] == NULL;
}

// Whether a part of a node is judged, which is too large as a whole; what is cut then is in w->cuts.
static bool find_cuts(struct watch * w, void * node, uint64_t whole) {
    const struct ggml * g = w->g;
    const char * word = g->ggml_op_name(AT(int, node, op));
    bool found = false;
    if (strcmp(word, "MUL_MAT") == 0) {
        found = cut_product(w, node, whole, 1) || cut_product(w, node, whole, 0);
    } else if (is_one_of(word, by_kernel)) {
        found = cut_by_kernel(w, node, whole, strcmp(word, "IM2COL") == 0);
    } else if (is_one_of(word, row_by_row) && (strcmp(word, "SOFT_MAX") != 0 || is_without_heads(g, node))) {
        for (int axis = 3; axis > 0 && !found; axis--) {
            found = cut_row_by_row(w, node, whole, axis, is_one_of(word, copies));
        }
    }
    w->n_cuts = found ? w->n_cuts : 0;
    w->inner = found && w->inner;
    return found;
}

// The rows that a SET_ROWS writes, if they are few of a memory that lies in one piece on this side.
static void find_window(struct watch * w, void * node) {
    const struct ggml * g = w->g;
    memset(&w->window, 0, sizeof(w->window));
    void * ids = (&AT(void *, node, src))[1], * into = (&AT(void *, node, src))[2];
    const int64_t * sizes = &AT(int64_t, node, ne);
    if (strcmp(g->ggml_op_name(AT(int, node, op)), "SET_ROWS") != 0 || ids == NULL || into == NULL
        || !g->ggml_is_contiguous(node) || !g->ggml_is_contiguous(into) || !g->ggml_is_contiguous(ids)
        || sizes[2] != 1 || sizes[3] != 1 || g->ggml_nbytes(node) <= SMALL / 16) {
        return;
    }
    void * buffer = AT(void *, ids, buffer);
    const int64_t count = (&AT(int64_t, ids, ne))[0];
    if (strcmp(g->ggml_type_name(AT(int, ids, type)), "i64") != 0 || count < 1
        || (buffer != NULL && !g->ggml_backend_buffer_is_host(buffer))) {
        return;
    }
    const int64_t * numbers = AT(int64_t *, ids, data);
    int64_t low = numbers[0], high = numbers[0];
    for (int64_t i = 1; i < count; i++) {
        low = numbers[i] < low ? numbers[i] : low;
        high = numbers[i] > high ? numbers[i] : high;
    }
    low = low > 0 ? low - 1 : 0;
    high = high < sizes[1] - 1 ? high + 1 : sizes[1] - 1;
    if (low <= high && 2 * (high - low + 1) < sizes[1]) {
        w->window = (struct window) { node, into, ids, low, high - low + 1 };
        add(&plan->partial, 1);
    }
}

static void tell_tensor(struct watch * w, void * tensor) {
    const struct ggml * g = w->g;
    char told[1024];
    const int type = AT(int, tensor, type);
    struct described more = { .block = (uint64_t) g->ggml_blck_size(type), .block_bytes = g->ggml_type_size(type),
                              .bytes = g->ggml_nbytes(tensor) };
    snprintf(more.op, sizeof(more.op), "%s", g->ggml_op_desc(tensor));
    snprintf(more.word, sizeof(more.word), "%s", g->ggml_op_name(AT(int, tensor, op)));
    snprintf(more.type, sizeof(more.type), "%s", g->ggml_type_name(type));
    if (g->at.size + sizeof(more) > sizeof(told)) {
        w->failed = true;
        return;
    }
    memcpy(told, tensor, g->at.size);
    if (is_windowed(w, tensor)) {
        const size_t step = (&AT(size_t, tensor, nb))[1], offset = (size_t) w->window.first * step;
        (&AT(int64_t, told, ne))[1] = w->window.count;
        AT(char *, told, data) += offset;
        AT(size_t, told, view_offs) += offset;
        more.bytes = bytes_in(w, tensor);
    }
    const struct cut * cut = cut_of(w, tensor);
    if (cut != NULL) {
        more.bytes = in_one_piece(g, tensor, cut, &AT(int64_t, told, ne), &AT(uint64_t, told, nb));
        if (cut == w->cuts && w->inner) {
            (&AT(int32_t, told, op_params))[3] = 0;
        }
    }
    memcpy(told + g->at.size, &more, sizeof(more));
    void * buffer = AT(void *, tensor, buffer);
    const bool is_host = buffer == NULL || g->ggml_backend_buffer_is_host(buffer);
    const uint32_t where = is_host ? HOST : is_hidden(g, buffer) ? HIDDEN : DEVICE;
    struct chunk head = { .kind = TENSOR, .where = where, .size = g->at.size + sizeof(more), .at = (uint64_t) tensor };
    if (cut != NULL || is_windowed(w, tensor)) {  // where the part begins, on which axis
        head.a = (uint64_t) (cut != NULL ? cut->axis : 1);
        head.b = (uint64_t) (cut != NULL ? cut->first : w->window.first);
    }
    put(w, head, told);
}

static void tell_bytes(struct watch * w, uint32_t kind, void * tensor) {
    const struct ggml * g = w->g;
    void * fetched;
    const bool is_part = is_windowed(w, tensor);
    const size_t whole = AT(void *, tensor, data) != NULL ? g->ggml_nbytes(tensor) : 0;
    size_t size = whole;
    const void * data = size ? bytes_of(g, tensor, size, &fetched) : NULL;
    const struct cut * cut = cut_of(w, tensor);
    if (cut != NULL && data != NULL) {
        uint64_t less;
        char * part = cut_out(g, tensor, cut, data, &less);
        free(fetched);
        data = fetched = part, size = part != NULL ? less : 0;
    }
    if (is_part && data != NULL) {
        data = (const char *) data + (size_t) w->window.first * (&AT(size_t, tensor, nb))[1];
        size = bytes_in(w, tensor);
    }
    int64_t * shifted = NULL;
    if (tensor == w->window.ids && data != NULL && (shifted = malloc(size)) != NULL) {
        for (size_t i = 0; i < size / sizeof(int64_t); i++) {
            shifted[i] = ((const int64_t *) data)[i] - w->window.first;
        }
        data = shifted;
    }
    put(w, (struct chunk) { .kind = kind, .size = data != NULL ? size : 0, .at = (uint64_t) tensor }, data);
    free(shifted);
    if (whole) {
        free(fetched);
    }
}

// ---- weights: each is handed over once, in a file of its own, and again when it has changed -----------------------

struct weight {
    const void * data;
    uint64_t size, sample, name;
    int id, owner;
};

#define MOST_WEIGHTS 65536
static struct weight weights[MOST_WEIGHTS];
static int n_weights;

static uint64_t mixed(uint64_t hash, const void * data, size_t size) {
    const unsigned char * bytes = data;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ bytes[i]) * 1099511628211ull;
    }
    return hash;
}

// A number for the values: of a few places that are spread over all of it.
static uint64_t sample_of(const struct ggml * g, void * tensor, size_t size) {
    void * buffer = AT(void *, tensor, buffer);
    const bool host = buffer == NULL || g->ggml_backend_buffer_is_host(buffer);
    if (is_hidden(g, buffer)) {
        return 0;
    }
    uint64_t hash = 1469598103934665603ull;
    char some[64];
    const size_t places = 64, step = size > places * sizeof(some) ? size / places : sizeof(some);
    for (size_t at = 0; at + 1 <= size; at += step) {
        const size_t count = size - at < sizeof(some) ? size - at : sizeof(some);
        if (host) {
            memcpy(some, AT(char *, tensor, data) + at, count);
        } else {
            g->ggml_backend_tensor_get(tensor, some, at, count);
        }
        hash = mixed(hash, some, count);
    }
    return hash;
}

static bool write_weight(const void * data, size_t size, int id) {
    char path[1100], part[1200];
    snprintf(path, sizeof(path), "%s/weight-%d-%d", folder, (int) getpid(), id);
    snprintf(part, sizeof(part), "%s.part", path);
    FILE * file = fopen(part, "wb");
    if (file == NULL) {
        return false;
    }
    const bool written = data != NULL && fwrite(data, 1, size, file) == size;
    if (fclose(file) != 0 || !written || rename(part, path) != 0) {
        unlink(part);
        return false;
    }
    return true;
}

static struct weight as_weight(const struct ggml * g, void * tensor) {
    const size_t size = g->ggml_nbytes(tensor);
    const char * name = field(g, tensor, g->at.name);
    return (struct weight) { .data = AT(void *, tensor, data), .size = size, .sample = sample_of(g, tensor, size),
                             .name = mixed(7, name, strlen(name)) };
}

// Where a weight is noted, or is to be; the lock is held.
static struct weight * place_of(const struct weight * sought) {
    for (uint64_t i = 0; i < 256; i++) {
        struct weight * each = &weights[(((uint64_t) sought->data >> 5) * 11400714819323198485ull + i) % MOST_WEIGHTS];
        if (each->data == NULL || (each->data == sought->data && each->name == sought->name)) {
            return each;
        }
    }
    return NULL;
}

static void hand_over(struct weight * place, struct weight sought, const void * data) {
    if (data == NULL || of(&plan->kept) + sought.size > plan->weights) {
        return;
    }
    sought.id = ++n_weights, sought.owner = (int) getpid();
    if (write_weight(data, sought.size, sought.id)) {
        add(&plan->kept, sought.size);
        *place = sought;
    }
}

// What is put into a memory that gives nothing back is handed over before.
static void keep_weight(struct ggml * g, void * tensor, const void * data, size_t offset, size_t size) {
    pthread_mutex_lock(&lock);
    if (is_readable(g) && is_leaf(g, tensor) && is_hidden(g, AT(void *, tensor, buffer)) && offset == 0
        && size == g->ggml_nbytes(tensor)) {
        const struct weight sought = as_weight(g, tensor);
        struct weight * place = place_of(&sought);
        if (place != NULL) {
            hand_over(place, sought, data);
        }
    }
    pthread_mutex_unlock(&lock);
}

static void tell_weight(struct watch * w, void * tensor) {
    const struct ggml * g = w->g;
    const size_t size = g->ggml_nbytes(tensor);
    const struct weight sought = as_weight(g, tensor);
    struct chunk said = { .kind = LACKING, .at = (uint64_t) tensor };
    pthread_mutex_lock(&lock);
    struct weight * found = place_of(&sought);
    const bool is_known = found != NULL && found->data != NULL && found->size == size && found->sample == sought.sample;
    if (found != NULL && !is_known) {
        void * fetched;
        hand_over(found, sought, bytes_of(g, tensor, size, &fetched));
        free(fetched);
    }
    if (found != NULL && found->data != NULL && found->size == size && found->sample == sought.sample) {
        said.kind = WEIGHT, said.a = (uint64_t) found->id, said.b = (uint64_t) found->owner;
    }
    pthread_mutex_unlock(&lock);
    put(w, said, NULL);
}

// ---- nodes --------------------------------------------------------------------------------------------------------

// Whether a node is nothing but another look at a memory that is not small: its place and its steps are judged.
static bool is_by_place(const struct ggml * g, void * node) {
    static const char * const words[] = { "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE" };
    void * base = AT(void *, node, view_src);
    const char * word = g->ggml_op_name(AT(int, node, op));
    bool is_look = false;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        is_look = is_look || strcmp(word, words[i]) == 0;
    }
    return is_look && base != NULL && g->ggml_nbytes(base) > SMALL / 16;
}

// A source of a node; NULL for one that it has had before.
static void * source_at(const struct ggml * g, void * node, uint64_t place) {
    void * const * sources = &AT(void *, node, src);
    for (uint64_t i = 0; i < place; i++) {
        if (sources[i] == sources[place]) {
            return NULL;
        }
    }
    return sources[place];
}

// The bytes that a node reads and gives, and are handed over: none of one that is judged by its place.
static uint64_t size_of(const struct watch * w, void * node) {
    const struct ggml * g = w->g;
    uint64_t size = is_windowed(w, node) ? bytes_in(w, node) : g->ggml_nbytes(node);
    for (uint64_t i = 0; i < g->at.sources; i++) {
        void * source = source_at(g, node, i);
        if (source != NULL && !is_weight(g, source)) {
            size += is_windowed(w, source) ? bytes_in(w, source) : g->ggml_nbytes(source);
        }
    }
    return is_by_place(g, node) ? 0 : size;
}

static void tell_source(struct watch * w, void * node, void * source) {
    tell_tensor(w, source);
    if (is_weight(w->g, source)) {
        tell_weight(w, source);
    } else if (!is_by_place(w->g, node)) {
        tell_bytes(w, DATA, source);
    }
}

// Before a node runs: what it is, and what it reads. Ops run in place, so this cannot be done afterwards.
static void before(struct watch * w, void * node) {
    const struct ggml * g = w->g;
    const bool computed = !g->at.computed || (AT(int32_t, node, flags) & (int32_t) g->at.computed);
    w->given = computed && !w->failed
        && (plan->nodes[0] == 0 || fnmatch(plan->nodes, field(g, node, g->at.name), 0) == 0);
    if (!w->given) {
        return;
    }
    if (w->bytes > PART) {
        close_part(w);
        w->failed = w->failed || !has_room();
        open_part(w);
    }
    find_window(w, node);
    w->n_cuts = 0, w->inner = false;
    const uint64_t whole = size_of(w, node);
    const bool is_part = whole > plan->large && find_cuts(w, node, whole);
    add(&plan->nodes_cut, is_part);
    tell_tensor(w, node);
    if (whole > plan->large && !is_part) {
        add(&plan->nodes_large, 1);
        for (uint64_t i = 0; i < g->at.sources; i++) {
            void * source = (&AT(void *, node, src))[i];
            if (source != NULL) {
                tell_tensor(w, source);
            }
        }
        put(w, (struct chunk) { .kind = LARGE, .at = (uint64_t) node }, NULL);
        w->given = false;
        return;
    }
    void * base = AT(void *, node, view_src);
    int count = 0;
    bool base_told = false;
    for (uint64_t i = 0; i < g->at.sources; i++) {
        void * source = source_at(g, node, i);
        count += (&AT(void *, node, src))[i] != NULL;
        if (source != NULL) {
            tell_source(w, node, source);
            base_told = base_told || source == base;
        }
    }
    if (base != NULL && !base_told) {
        const char * word = g->ggml_op_name(AT(int, node, op));
        const bool is_written = strcmp(word, "SET_ROWS") == 0 && count == 2;  // older ones do not state it as a source
        const bool is_seen = strcmp(word, "VIEW") == 0 && !is_by_place(g, node);
        tell_tensor(w, base);
        if (is_written || is_seen) {
            tell_bytes(w, DATA, base);
        }
    }
    put(w, (struct chunk) { .kind = NODE, .at = (uint64_t) node }, NULL);
}

static void after(struct watch * w, void * node) {
    if (!w->given) {
        return;
    }
    if (is_by_place(w->g, node)) {
        put(w, (struct chunk) { .kind = RESULT, .at = (uint64_t) node }, NULL);
    } else {
        tell_bytes(w, RESULT, node);
    }
}

static bool look(void * node, bool ask, void * user) {
    struct watch * w = user;
    const uint64_t start = now();
    if (ask) {
        w->they_want = w->theirs != NULL && w->theirs(node, true, w->user);
        before(w, node);
    } else {
        after(w, node);
    }
    add(&plan->added, now() - start);
    return ask || !w->they_want || w->theirs(node, false, w->user);
}

static void begin_watch(struct watch * w, struct ggml * g, uint64_t number) {
    memset(w, 0, sizeof(*w));
    w->g = g, w->number = number;
    open_part(w);
}

static void end_watch(struct watch * w, int status) {
    const uint64_t start = now();
    put(w, (struct chunk) { .kind = END, .at = 0, .a = (uint64_t) (int64_t) status }, NULL);
    close_part(w);
    add(w->failed ? &plan->failed : &plan->watched, 1);
    add(&plan->added, now() - start);
}

// ---- the program's own callbacks of schedulers, which go on working -----------------------------------------------

struct own {
    void * sched;
    eval callback;
    void * user;
};

#define MOST_OWN 256
static struct own owns[MOST_OWN];

static struct own own_of(void * sched) {
    struct own found = { sched, NULL, NULL };
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_OWN; i++) {
        found = owns[i].sched == sched ? owns[i] : found;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void note_own(void * sched, eval callback, void * user) {
    pthread_mutex_lock(&lock);
    int place = -1;
    for (int i = MOST_OWN - 1; i >= 0; i--) {
        place = owns[i].sched == NULL && (place < 0 || owns[place].sched == NULL) ? i : place;
        place = owns[i].sched == sched ? i : place;
    }
    if (place >= 0) {
        owns[place] = callback != NULL ? (struct own) { sched, callback, user } : (struct own) { NULL, NULL, NULL };
    }
    pthread_mutex_unlock(&lock);
}

// ---- the functions whose place is taken ---------------------------------------------------------------------------

static int lost(const char * name) {
    fprintf(stderr, "llamadiff watch: %s was called, and is nowhere\n", name);
    return -1;  // GGML_STATUS_FAILED
}

typedef int (*compute)(void *, void *);

static int passed(compute real, void * by, void * graph, const char * name) {
    if (real == NULL) {
        return lost(name);
    }
    inside++;
    const int status = real(by, graph);
    inside--;
    return status;
}

static bool is_to_watch(struct ggml * g, void * graph, uint64_t * number) {
    const bool is_empty = g->ggml_graph_n_nodes != NULL && g->ggml_graph_n_nodes(graph) == 0;
    return plan != NULL && inside == 0 && !is_empty && is_wanted(g, graph, number);
}

// By a scheduler: it asks about each node before and after that runs.
static int by_scheduler(struct ggml * g, compute real, void * sched, void * graph, const char * name) {
    uint64_t number;
    if (g->ggml_backend_sched_set_eval_callback == NULL || !is_to_watch(g, graph, &number)) {
        return passed(real, sched, graph, name);
    }
    const struct own theirs = own_of(sched);
    struct watch w;
    begin_watch(&w, g, number);
    w.theirs = theirs.callback, w.user = theirs.user;
    inside++;
    g->ggml_backend_sched_set_eval_callback(sched, look, &w);
    inside--;
    const int status = passed(real, sched, graph, name);
    inside++;
    g->ggml_backend_sched_synchronize(sched);
    g->ggml_backend_sched_set_eval_callback(sched, theirs.callback, theirs.user);
    inside--;
    end_watch(&w, status);
    return status;
}

// By a backend, or with a plan (which comes second): each node as a graph of its own, by ``one``.
static int by_nodes(
    struct ggml * g, compute real, compute one, bool second, void * by, void * graph, const char * name
) {
    uint64_t number;
    const bool can = one && g->ggml_init && g->ggml_graph_add_node && g->ggml_graph_clear;
    const bool wanted = is_to_watch(g, graph, &number);
    if (!can || !wanted) {
        if (wanted) {
            add(&plan->failed, 1);
        }
        return passed(real, second ? graph : by, second ? by : graph, name);
    }
    struct watch w;
    begin_watch(&w, g, number);
    const struct params room = { g->ggml_graph_overhead_custom(8, false) + 4096, NULL, true };
    void * context = g->ggml_init(room);
    void * alone = g->ggml_new_graph_custom(context, 8, false);
    const int count = g->ggml_graph_n_nodes(graph);
    int status = 0;
    for (int i = 0; i < count && status == 0; i++) {
        void * node = g->ggml_graph_node(graph, i);
        look(node, true, &w);
        g->ggml_graph_clear(alone);
        g->ggml_graph_add_node(alone, node);
        status = passed(one, second ? alone : by, second ? by : alone, name);
        look(node, false, &w);
    }
    g->ggml_free(context);
    end_watch(&w, status);
    return status;
}

#define EXPORT __attribute__((visibility("default")))
#define HERE ggml_of(__builtin_return_address(0))

EXPORT int ggml_backend_sched_graph_compute(void * sched, void * graph) {
    struct ggml * g = HERE;
    return by_scheduler(g, g->ggml_backend_sched_graph_compute, sched, graph, "ggml_backend_sched_graph_compute");
}

EXPORT int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    struct ggml * g = HERE;
    return by_scheduler(
        g, g->ggml_backend_sched_graph_compute_async, sched, graph, "ggml_backend_sched_graph_compute_async");
}

EXPORT int ggml_backend_graph_compute(void * backend, void * graph) {
    struct ggml * g = HERE;
    const compute real = g->ggml_backend_graph_compute;
    return by_nodes(g, real, real, false, backend, graph, "ggml_backend_graph_compute");
}

EXPORT int ggml_backend_graph_compute_async(void * backend, void * graph) {  // watched, each node is waited for
    struct ggml * g = HERE;
    const compute real = g->ggml_backend_graph_compute_async, one = g->ggml_backend_graph_compute;
    return by_nodes(g, real, one, false, backend, graph, "ggml_backend_graph_compute_async");
}

EXPORT int ggml_graph_compute(void * graph, void * cplan) {
    struct ggml * g = HERE;
    const compute real = g->ggml_graph_compute;
    return by_nodes(g, real, real, true, cplan, graph, "ggml_graph_compute");
}

EXPORT void ggml_backend_sched_set_eval_callback(void * sched, eval callback, void * user) {
    struct ggml * g = HERE;
    if (inside == 0) {
        note_own(sched, callback, user);
    }
    if (g->ggml_backend_sched_set_eval_callback == NULL) {
        lost("ggml_backend_sched_set_eval_callback");
        return;
    }
    g->ggml_backend_sched_set_eval_callback(sched, callback, user);
}

EXPORT void ggml_backend_sched_free(void * sched) {
    struct ggml * g = HERE;
    note_own(sched, NULL, NULL);
    if (g->ggml_backend_sched_free == NULL) {
        lost("ggml_backend_sched_free");
        return;
    }
    g->ggml_backend_sched_free(sched);
}

EXPORT void ggml_backend_tensor_set(void * tensor, const void * data, size_t offset, size_t size) {
    struct ggml * g = HERE;
    if (g->ggml_backend_tensor_set == NULL) {
        lost("ggml_backend_tensor_set");
        return;
    }
    if (plan != NULL && inside == 0 && g->ggml_backend_buffer_get_type != NULL && judge_lives()) {
        keep_weight(g, tensor, data, offset, size);
    }
    g->ggml_backend_tensor_set(tensor, data, offset, size);
}

// The ggml that whoever calls from a place means.
static struct ggml * ggml_of(void * place) {
    static struct ggml none;
    static struct call { void * place; struct ggml * whose; } calls[1024];  // dladdr looks at all names of a library
    pthread_once(&once, begin);
    struct call * call = &calls[((uint64_t) place >> 2) % 1024];
    if (__atomic_load_n(&call->place, __ATOMIC_ACQUIRE) == place) {
        struct ggml * whose = __atomic_load_n(&call->whose, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&call->place, __ATOMIC_ACQUIRE) == place) {
            return whose;
        }
    }
    Dl_info caller;
    void * base = dladdr(place, &caller) ? caller.dli_fbase : NULL;
    pthread_mutex_lock(&lock);
    struct ggml * found = NULL;
    for (int i = 0; i < n_ggmls && found == NULL; i++) {
        found = ggmls[i].caller == base ? &ggmls[i] : NULL;
    }
    if (found == NULL && n_ggmls < MOST_GGMLS) {
        found = &ggmls[n_ggmls];
        void * library = base != NULL ? dlopen(caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        found->caller = base, found->number = -1;
#define FIND(result, name, arguments) *(void **) &found->name = meant(library, #name);
        FUNCTIONS(FIND)
#undef FIND
        if (found->ggml_graph_n_nodes == NULL) {
#define FIND(result, name, arguments) *(void **) &found->name = anywhere(#name);
            FUNCTIONS(FIND)
#undef FIND
        }
        n_ggmls++;
    }
    if (found != NULL) {
        __atomic_store_n(&call->place, NULL, __ATOMIC_RELEASE);
        __atomic_store_n(&call->whose, found, __ATOMIC_RELEASE);
        __atomic_store_n(&call->place, place, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return found != NULL ? found : &none;
}
