// In the program under study: at each call and return of its functions, wait until the recorder has looked at memory.
const PIPES = Memory.alloc(8); // where messages go, where replies come from
const LOCK = Memory.alloc(128); // a mutex: one thread at a time
const STOPPING = Memory.alloc(8); // the thread that is in a stop
const CALLS = Memory.alloc(32); // the last four calls that were new
const REPEATS = Memory.alloc(32); // how often each came since
const NEWEST = Memory.alloc(8); // how many were new
const MUTED = Memory.alloc(1 << 16); // a byte a function
const END = 0xffffffff; // in place of a function's number
const libc = (name) => Module.getGlobalExportByName(name);
const own = (folder) => Process.enumerateModules().filter((each, i) => i === 0 || each.path.startsWith(folder + '/'));
const hooks = new CModule(`
#include <gum/guminterceptor.h>

extern long read (int, void *, unsigned long);
extern long write (int, const void *, unsigned long);
extern int getpid (void);
extern void _exit (int);
extern int pthread_mutex_lock (void *);
extern int pthread_mutex_unlock (void *);
extern int pipes[2];
extern char lock[];
extern unsigned char muted[];
extern unsigned long stopping, newest, calls[4], repeats[4];

static void
stop (GumInvocationContext * context, unsigned int leaves)
{
  unsigned long function = (unsigned long) gum_invocation_context_get_listener_function_data (context);
  unsigned long thread = gum_invocation_context_get_thread_id (context);
  unsigned long call = (unsigned long) gum_invocation_context_get_return_address (context) * 2 + leaves;
  unsigned int message[4], i;
  unsigned char reply;

  if (muted[function] || stopping == thread)
    return;
  for (i = 0; i != 4 && calls[i] != call; i++);
  if (i != 4) {
    repeats[i]++;
    if (repeats[i] > 4 && (repeats[i] & (repeats[i] - 1)) != 0) /* a loop: its first turns, then ever more seldom */
      return;
  } else {
    repeats[0] = repeats[1] = repeats[2] = repeats[3] = 0;
    calls[newest++ % 4] = call;
  }
  pthread_mutex_lock (lock);
  stopping = thread;
  message[0] = function;
  message[1] = leaves;
  message[2] = getpid ();
  message[3] = 0;
  write (pipes[0], message, sizeof (message));
  if (read (pipes[1], &reply, 1) != 1)
    _exit (125);
  if (reply == 'm')
    muted[function] = 1;
  stopping = 0;
  pthread_mutex_unlock (lock);
}

void on_enter (GumInvocationContext * context) { stop (context, 0); }
void on_leave (GumInvocationContext * context) { stop (context, 1); }
`, {
  pipes: PIPES, lock: LOCK, stopping: STOPPING, calls: CALLS, repeats: REPEATS, newest: NEWEST, muted: MUTED,
  ...Object.fromEntries(
    ['read', 'write', 'getpid', '_exit', 'pthread_mutex_lock', 'pthread_mutex_unlock'].map((name) => [name, libc(name)])),
});

rpc.exports = {
  // Where the program is loaded, and the addresses of functions of it and of libraries that lie in its folder.
  functions(folder) {
    const found = new Set();
    for (const module of own(folder))
      for (const each of module.enumerateSymbols())
        if (each.type === 'function' && each.size > 0 && each.section?.id.includes('.text') && !each.name.startsWith('_'))
          found.add(each.address.toString());
    return [Process.mainModule.base.toString(), [...found]];
  },
  // What the program calls in libraries between its ops, where it has few functions of its own: maths, BLAS, threads.
  imports(folder, pattern) {
    const names = new RegExp(pattern), found = new Set();
    const dlsym = new NativeFunction(libc('dlsym'), 'pointer', ['pointer', 'pointer']); // as the linker will resolve it
    for (const module of own(folder))
      for (const each of module.enumerateImports())
        if (each.type === 'function' && names.test(each.name)) {
          const address = dlsym(NULL, Memory.allocUtf8String(each.name));
          if (!address.isNull()) found.add(address.toString());
        }
    return [...found];
  },
  // Stop at these addresses, of which the first are the program's own, and say the code that it ends with.
  stopAt(messages, replies, addresses, count) {
    const open = new NativeFunction(libc('open'), 'int', ['pointer', 'int']);
    const write = new NativeFunction(libc('write'), 'int', ['int', 'pointer', 'size_t']);
    const pipe = open(Memory.allocUtf8String(messages), 1);
    const read = new NativeFunction(libc('read'), 'long', ['int', 'pointer', 'ulong']);
    const answers = open(Memory.allocUtf8String(replies), 0);
    PIPES.writeInt(pipe);
    PIPES.add(4).writeInt(answers);
    addresses.forEach((address, number) => {
      const leave = number < count ? { onLeave: hooks.on_leave } : {};
      try {
        Interceptor.attach(ptr(address), { onEnter: hooks.on_enter, ...leave }, ptr(number));
      } catch (error) {} // too short a function, or one that is there twice
    });
    const message = Memory.alloc(16);
    Interceptor.attach(libc('exit'), {
      onEnter(args) {
        message.writeU32(END).add(4).writeU32(args[0].toUInt32() & 0xff).add(4).writeU32(Process.id).add(4).writeU32(1);
        write(pipe, message, 16);
        read(answers, message, 1); // until what was written last has been looked at
      },
    });
    Interceptor.flush();
  },
};
