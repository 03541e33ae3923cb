// In the program under study: at each call and return of its functions, wait until whoever records has looked at memory.
const PIPES = Memory.alloc(8); // where stops are told, where leave to go on is read
const LOCK = Memory.alloc(128); // a mutex: one thread at a time
const LOOP = Memory.alloc(80);
const MUTED = Memory.alloc(1 << 16); // a byte a function
const libc = (name) => Module.getGlobalExportByName(name);
const stops = new CModule(`
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
extern unsigned long loop[10]; /* the last four calls that were new, how often each came since; the next; who stops */

static void
stop (GumInvocationContext * context, unsigned int leaves)
{
  unsigned long function = (unsigned long) gum_invocation_context_get_listener_function_data (context);
  unsigned long thread = gum_invocation_context_get_thread_id (context);
  unsigned long call = (unsigned long) gum_invocation_context_get_return_address (context) * 2 + leaves;
  unsigned int told[4], i;
  unsigned char leave;

  if (muted[function] || loop[9] == thread)
    return;
  for (i = 0; i != 4 && loop[i] != call; i++);
  if (i != 4) {
    loop[4 + i]++;
    if (loop[4 + i] > 4 && (loop[4 + i] & (loop[4 + i] - 1)) != 0) /* a loop: first turns, then ever more seldom */
      return;
  } else {
    loop[4] = loop[5] = loop[6] = loop[7] = 0;
    loop[loop[8] % 4] = call;
    loop[8]++;
  }
  pthread_mutex_lock (lock);
  loop[9] = thread;
  told[0] = function;
  told[1] = leaves;
  told[2] = thread;
  told[3] = getpid ();
  write (pipes[0], told, sizeof (told));
  if (read (pipes[1], &leave, 1) != 1)
    _exit (125);
  if (leave == 'm')
    muted[function] = 1;
  loop[9] = 0;
  pthread_mutex_unlock (lock);
}

void on_enter (GumInvocationContext * context) { stop (context, 0); }
void on_leave (GumInvocationContext * context) { stop (context, 1); }
`, {
  pipes: PIPES, lock: LOCK, loop: LOOP, muted: MUTED,
  ...Object.fromEntries(
    ['read', 'write', 'getpid', '_exit', 'pthread_mutex_lock', 'pthread_mutex_unlock'].map((name) => [name, libc(name)])),
});

rpc.exports = {
  // Functions of the program and of libraries that lie under a folder: [name, address, module].
  functions(folder) {
    const own = Process.enumerateModules().filter((m, i) => i === 0 || m.path.startsWith(folder + '/'));
    const found = new Map();
    for (const module of own)
      for (const symbol of module.enumerateSymbols())
        if (symbol.type === 'function' && symbol.size > 0 && symbol.section && symbol.section.id.includes('.text'))
          found.set(symbol.address.toString(), [symbol.name, symbol.address.toString(), module.name]);
    return [...found.values()];
  },
  // What the program calls in libraries between its ops, where it has few functions of its own: maths, BLAS, threads.
  imports(folder, pattern) {
    const names = new RegExp(pattern), found = new Map();
    const dlsym = new NativeFunction(libc('dlsym'), 'pointer', ['pointer', 'pointer']); // as the linker will resolve it
    for (const module of Process.enumerateModules().filter((m, i) => i === 0 || m.path.startsWith(folder + '/')))
      for (const each of module.enumerateImports())
        if (each.type === 'function' && names.test(each.name)) {
          const address = dlsym(NULL, Memory.allocUtf8String(each.name));
          if (!address.isNull()) found.set(address.toString(), [each.name, address.toString()]);
        }
    return [...found.values()];
  },
  modules() {
    return Process.enumerateModules().map((module) => [module.path, module.base.toString(), module.size]);
  },
  // Tell the code that the program ends with.
  tellEnd() {
    const write = new NativeFunction(libc('write'), 'int', ['int', 'pointer', 'size_t']);
    const told = Memory.alloc(16);
    Interceptor.attach(libc('exit'), {
      onEnter(args) {
        told.writeU32(0xffffffff).add(4).writeU32(args[0].toUInt32() & 0xff).add(4).writeU32(0).add(4).writeU32(0);
        write(PIPES.readInt(), told, 16);
      },
    });
  },
  // Stop at these addresses, of which the first are the program's own; those where nothing can be attached are returned.
  stopAt(told, heard, addresses, own) {
    const open = new NativeFunction(libc('open'), 'int', ['pointer', 'int']);
    PIPES.writeInt(open(Memory.allocUtf8String(told), 1));
    PIPES.add(4).writeInt(open(Memory.allocUtf8String(heard), 0));
    const refused = [];
    addresses.forEach((address, number) => {
      try {
        const at = number < own ? { onEnter: stops.on_enter, onLeave: stops.on_leave } : { onEnter: stops.on_enter };
        Interceptor.attach(ptr(address), at, ptr(number));
      } catch (error) {
        refused.push([number, String(error)]);
      }
    });
    Interceptor.flush();
    return refused;
  },
};
