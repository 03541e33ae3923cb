// In a JavaScript program under study: each file is rewritten in memory as it is loaded, with a call behind each of its
// statements and around each value that it returns. The calls log the arrays that are in scope there, if they changed.
// Lines stay as they are, and a source map keeps columns, so that errors are shown as without it.
'use strict';
const fs = require('fs');
const Module = require('module');
const path = require('path');
const vm = require('vm');
const { isAnyArrayBuffer, isProxy } = require('util').types;
const { spawnSync } = require('child_process');
const { isMainThread } = require('worker_threads');
const { fileURLToPath, pathToFileURL } = require('url');

const NAME = '__llamadiff_recorder';
const OLDEST = 18; // node's major version
const POINTS = 1 << 16; // in all files of one kind of module; of more, the rest is left as it is
const LONGEST = 4 << 20; // characters of a file that is rewritten
const NAMES = 32; // variables that are looked at at one place, the last that were used
const globals = new Set(Object.getOwnPropertyNames(globalThis));

// -- the text of a program: tokens, and where something can be put between them ---------------------------------

const KEYWORDS = new Set(`await break case catch class const continue debugger default delete do else export extends
  enum finally for function if implements import in instanceof interface let new package private protected public
  return static switch throw try typeof var void while with yield`.split(/\s+/));
const VALUES = new Set(['this', 'super', 'null', 'true', 'false']); // words that end an expression
const CONTROL = new Set(['if', 'for', 'while', 'with', 'switch', 'catch']);
const GOES_ON = new Set(['in', 'of', 'instanceof', 'else', 'catch', 'finally', 'while', 'as', 'from', 'extends']);
const TOKEN = /\s+|\/\/[^\n]*|\/\*[^]*?\*\/|#?[\p{ID_Start}$_][\p{ID_Continue}$\u200c\u200d]*|\.?\d(?:[eE][+-]?\d|[\w.])*|"(?:[^"\\\n]|\\[^])*"|'(?:[^'\\\n]|\\[^])*'|=>|\?\.(?!\d)|\?\?|\+\+|--|\.\.\.|[^]/uy;
const REGEX = /\/(?:[^/\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/[\p{ID_Continue}$]*/uy;
const TEMPLATE = /(?:[^`\\$]|\\[^]|\$(?!\{))*(`|\$\{)/uy;

// Tokens of a text: {text, start, end, type, line (whether a new line begins before it), match (of a bracket)}.
function tokensOf(text) {
  const tokens = [], open = [];
  let at = text.startsWith('#!') ? text.indexOf('\n') : 0, line = true;
  const add = (type, end) => {
    tokens.push({ text: text.slice(at, end), start: at, end, type, line, match: -1 });
    line = false;
    at = end;
  };
  const template = (from) => { // up to its end, or to an expression in it
    TEMPLATE.lastIndex = from;
    const found = TEMPLATE.exec(text);
    if (!found) throw new SyntaxError('template');
    const inside = found[1] === '${';
    add(inside ? 'open' : 'value', TEMPLATE.lastIndex);
    if (inside) open.push(tokens.length - 1);
  };
  if (at < 0) return tokens;
  while (at < text.length) {
    TOKEN.lastIndex = at;
    const piece = TOKEN.exec(text)[0], end = TOKEN.lastIndex, first = piece[0];
    if (/^\s/.test(piece) || piece.startsWith('//') || piece.startsWith('/*')) {
      line ||= piece.includes('\n');
      at = end;
    } else if (first === '`') {
      template(end);
    } else if (first === '/' && !endsValue(tokens, tokens.length - 1)) {
      REGEX.lastIndex = at;
      if (!REGEX.exec(text)) throw new SyntaxError('regular expression');
      add('value', REGEX.lastIndex);
    } else if (/^[\p{ID_Start}$_#]/u.test(piece) && piece !== '#') {
      add('word', end);
    } else if (/^[\d"']/.test(piece) || /^\.\d/.test(piece)) {
      add('value', end);
    } else if ('([{'.includes(first)) {
      open.push(tokens.length);
      add('open', end);
    } else if (')]}'.includes(first)) {
      const begins = open.pop();
      if (begins === undefined) throw new SyntaxError('brackets');
      if (tokens[begins].text.endsWith('${')) {
        add('close', end);
        tokens[begins].match = tokens.length - 1;
        tokens[tokens.length - 1].match = begins;
        template(at);
        continue;
      }
      add('close', end);
      tokens[begins].match = tokens.length - 1;
      tokens[tokens.length - 1].match = begins;
    } else add('sign', end);
  }
  if (open.length) throw new SyntaxError('brackets');
  return tokens;
}

// Whether a value may end with a token, so that behind it / divides.
function endsValue(tokens, number) {
  const token = tokens[number];
  if (!token) return false;
  if (token.type === 'word') return isMember(tokens, number) || !KEYWORDS.has(token.text);
  if (token.text === ')') return !isControl(tokens, token.match);
  return token.type === 'value' || token.text === ']' || token.text === '}' || token.text === '++' || token.text === '--';
}
const isMember = (tokens, number) => ['.', '?.'].includes(tokens[number - 1]?.text);

// Whether a ( is that of an if, a for and so on.
function isControl(tokens, open) {
  let before = open - 1;
  if (tokens[before]?.text === 'await') before--;
  return CONTROL.has(tokens[before]?.text) && !isMember(tokens, before);
}

// Whether a statement ends between two tokens, though no ; is there.
function isEnd(tokens, number) {
  const next = tokens[number + 1];
  return next?.line && next.type === 'word' && !GOES_ON.has(next.text) && tokens[number].text !== '++'
    && tokens[number].text !== '--' && endsValue(tokens, number);
}

// What each { begins: a block, the block behind a word or a () that governs it, a function, a class or a value.
function bracesOf(tokens) {
  const kinds = new Map(), begins = new Map(), inside = [];
  let pending = [];
  tokens.forEach((token, number) => {
    const before = tokens[number - 1]?.text;
    if (token.text === 'class' && !isMember(tokens, number)) pending.push(inside.length);
    if (token.type === 'open') {
      let kind = token.text;
      if (kind === '{') {
        const outer = inside.length ? kinds.get(inside[inside.length - 1]) : 'block';
        const listed = ['block', 'governed', 'function'].includes(outer);
        if (pending[pending.length - 1] === inside.length) {
          pending.pop();
          kind = 'class';
        } else if (before === '=>') {
          kind = 'function';
          const end = tokens[number - 2];
          begins.set(number, end.text === ')' ? end.match : number - 2);
        } else if (before === ')') {
          const open = tokens[number - 1].match;
          kind = isControl(tokens, open) ? 'governed' : 'function';
          begins.set(number, open);
        } else if (['else', 'do', 'try', 'finally', 'catch'].includes(before)) kind = 'governed';
        else if (before === 'static') kind = 'block';
        else if (listed && (before === undefined || [';', '{', '}', ':'].includes(before))) kind = 'block';
        else kind = 'value';
      }
      kinds.set(number, kind);
      inside.push(number);
    } else if (token.type === 'close') inside.pop();
  });
  return { kinds, begins };
}

// Where an expression that begins with a token ends: the number of its last one.
function lastOf(tokens, number) {
  let questions = 0;
  for (let at = number; at < tokens.length; at++) {
    const { text, type, match } = tokens[at];
    if (text === '?') questions++;
    if (type === 'close' || text === ';' || text === ',' || (text === ':' && questions-- === 0)) return at - 1;
    if (type === 'open') at = match;
    if (isEnd(tokens, at)) return at;
  }
  return tokens.length - 1;
}

// Names of variables, this, and private fields that are used up to a token in its own function, the last ones.
function namesBefore(tokens, kinds, from, to) {
  const names = new Set();
  for (let at = to; at >= from && names.size < NAMES; at--) {
    const { text, type, match } = tokens[at];
    if (text === '}' && ['function', 'class'].includes(kinds.get(match))) at = match;
    if (type !== 'word') continue;
    if (text.startsWith('#') && tokens[at - 1]?.text === '.' && tokens[at - 2]?.type === 'word' && !isMember(tokens, at - 2))
      names.add(`${tokens[at - 2].text}.${text}`);
    else if (!text.startsWith('#') && !isMember(tokens, at) && !KEYWORDS.has(text) && !globals.has(text)
      && (text === 'this' || !VALUES.has(text)) && text !== NAME && text !== 'async') names.add(text);
  }
  return [...names];
}

// What is put into a text, by offset: [offset, text]. values: also around what functions return.
function additions(tokens, number, values) {
  const { kinds, begins } = bracesOf(tokens), added = [], inside = [];
  const point = (at, start) => {
    const seen = namesBefore(tokens, kinds, start, at).map((name) =>
      `try{typeof ${name}=='object'&&${NAME}.see(${name})}catch{}`).join('');
    return seen && `if(${NAME}.on(${number()})){${seen}}`;
  };
  const around = (first, last) => {
    if (last < first) return;
    added.push([tokens[first].start, `${NAME}.value(${number()},(`], [tokens[last].end, `))`, true]);
  };
  tokens.forEach((token, at) => {
    const next = tokens[at + 1];
    if (token.type === 'close') inside.pop();
    else if (token.type === 'open') inside.push(at);
    const here = token.type === 'open' ? inside[inside.length - 2] : inside[inside.length - 1];
    const kind = here === undefined ? 'block' : kinds.get(here);
    if (values && token.text === 'return' && !isMember(tokens, at) && next && !next.line && next.text !== ';'
      && next.text !== '}' && next.text !== ':' && ['block', 'governed', 'function'].includes(kind)) {
      let last = at;
      do last = lastOf(tokens, last + 1); while (tokens[last + 1]?.text === ',' && ++last);
      around(at + 1, last);
    }
    if (values && token.text === '=>' && next && next.text !== '{') around(at + 1, lastOf(tokens, at + 1));
    if (!['block', 'governed', 'function'].includes(kind) || !next) return;
    const isLast = next.text === '}';
    const closes = token.text === '}' ? kinds.get(token.match) : '';
    const plain = token.text === ';' || (closes === 'governed' && !GOES_ON.has(next.text));
    if ((token.text === ';' && next.text === 'else') || token.type === 'open' || tokens[at].text === '=>') return;
    const asi = !plain && (isEnd(tokens, at) || (isLast && kind === 'function' && endsValue(tokens, at)));
    if (!plain && (!asi || closes)) return;
    const outer = inside.findLast((each) => kinds.get(each) === 'function');
    const text = point(at, outer === undefined ? 0 : begins.get(outer));
    if (text) added.push([token.end, asi ? `;${text}` : text]);
  });
  // At one place, what closes comes before what opens; what is behind a statement comes last.
  return added.map((each, order) => [...each.slice(0, 2), each[2] ? 0 : 1, order])
    .sort((a, b) => a[0] - b[0] || a[2] - b[2] || a[3] - b[3]);
}

const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/';
function vlq(value) {
  let rest = value < 0 ? (-value << 1) | 1 : value << 1, out = '';
  do {
    const digit = rest & 31;
    rest >>>= 5;
    out += DIGITS[digit | (rest ? 32 : 0)];
  } while (rest);
  return out;
}

// A text with what is added to it, and its source map.
function joined(text, added, url) {
  let out = '', from = 0, column = 0, lastColumn = 0, line = 0, lastLine = 0, sourceColumn = 0, lastSource = 0;
  const lines = [[]];
  const mark = () => {
    lines[lines.length - 1].push(vlq(column - lastColumn) + 'A' + vlq(line - lastLine) + vlq(sourceColumn - lastSource));
    [lastColumn, lastLine, lastSource] = [column, line, sourceColumn];
  };
  const copy = (piece) => {
    mark();
    piece.split('\n').forEach((part, number) => {
      if (number) {
        line++;
        column = lastColumn = sourceColumn = 0;
        lines.push([]);
        mark();
      }
      for (const word of part.matchAll(/[\w$]+|[^\w$]+/g)) { // a place for each name that an error may be at
        mark();
        column += word[0].length;
        sourceColumn += word[0].length;
      }
    });
    out += piece;
  };
  for (const [offset, more] of added) {
    if (offset > from) copy(text.slice(from, offset));
    from = Math.max(from, offset);
    out += more;
    column += more.length;
  }
  copy(text.slice(from));
  const map = { version: 3, sources: [url], names: [], mappings: lines.map((each) => each.join(',')).join(';') };
  const encoded = Buffer.from(JSON.stringify(map)).toString('base64');
  return `${out}\n//# sourceMappingURL=data:application/json;base64,${encoded}`;
}

// A program's file with calls in it; as it was where that cannot be, or where it is not the program's own.
let points = 0, firstPoint = 0;
function rewritten(text, file, url, isRight) {
  if (file.includes(`${path.sep}node_modules${path.sep}`) || text.length > LONGEST || /\/[/*][#@] sourceMappingURL=/.test(text))
    return text;
  for (const values of [true, false]) {
    const before = points;
    try {
      const added = additions(tokensOf(text), () => firstPoint + points++, values);
      if (points > POINTS) return text;
      const out = joined(text, added, url);
      if (isRight(out)) return out;
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
    points = before;
  }
  return text;
}

function isScript(text) {
  try {
    vm.compileFunction(text, ['exports', 'require', 'module', '__filename', '__dirname']);
    return true;
  } catch {
    return false;
  }
}

function isModule(text) {
  const file = path.join(folder, 'checked.mjs');
  fs.writeFileSync(file, text);
  const { LLAMADIFF_RECORD, NODE_OPTIONS, ...env } = process.env;
  return spawnSync(process.execPath, ['--check', file], { env, stdio: 'ignore' }).status === 0;
}

function asModule(url, result) {
  if (result.format !== 'module' || !url.startsWith('file:') || result.source == null) return result;
  const text = typeof result.source === 'string' ? result.source : Buffer.from(result.source).toString();
  return { ...result, source: rewritten(text, fileURLToPath(url), url, isModule) };
}

// -- what is in scope, and what of it changed --------------------------------------------------------------------

const FLOATS = new Set(['Float32Array', 'Float64Array', 'Uint16Array', 'Float16Array']);
const PAGE = 4096; // that of search.py: two buffers share none
const DEEP = 3; // containers in containers
const MANY = 256; // entries of a container
const LONG = 1 << 16; // numbers of a plain array
const ROW = 8; // words: of an array that changes by less more may change
const WHOLE = 1 << 12; // words of an array that is logged whole
const WORD = 4; // bytes
const GAP = 16; // words between changes that are logged as one
const SMALL = 1 << 14; // bytes that are always compared
const SELDOM = 64; // looks between two comparisons of what never changes, at most
const LARGE = 32 << 20; // bytes: what is as large when it is first seen is weights, as is what is longer than WHOLE and part of a larger buffer
const LARGEST = 2 ** 30; // bytes of a buffer that is looked at
const STOPS = 1 << 18;
const RING = 12; // places that follow one another in a loop, at most
const FEW = 2; // turns of a loop that are all looked at

// Whether a turn of a loop is not looked at: of many those that are powers of four are.
const isSeldom = (turn) => turn > FEW && (turn < 16 || (turn & (turn - 1)) !== 0 || Math.clz32(turn) % 2 === 0);


class Recorder {
  constructor(most) {
    this.most = most;
    this.files = ['spans', 'words'].map((name) => fs.openSync(path.join(folder, name), 'a'));
    this.chunks = [[], []];
    this.waiting = this.bytes = this.stop = this.news = this.looks = this.oldest = 0;
    this.ring = new Int32Array(RING).fill(-1); // the last places that were new
    this.turns = new Float64Array(RING); // how often each came since
    this.fresh = this.wrote = false;
    this.next = PAGE;
    this.buffers = new WeakMap();
    this.arrays = new WeakMap(); // plain ones of numbers
    this.containers = new WeakMap();
    this.seen = new Float64Array(2 * POINTS).fill(-1); // of each place: how much news there had been
    this.idle = new Float64Array(2 * POINTS); // and how often it came since then
    this.runs = true;
  }

  // Whether to look at variables: in a loop at its first turns, then ever more seldom, and so where nothing was new.
  on(place) {
    if (!this.runs) return false;
    const slot = this.ring.indexOf(place);
    if (slot < 0) {
      this.ring[this.oldest++ % RING] = place;
      this.turns.fill(0);
    } else if (isSeldom(++this.turns[slot])) return false;
    if (this.seen[place] !== this.news) this.idle[place] = 0;
    else if (isSeldom(++this.idle[place])) return false;
    this.seen[place] = this.news;
    this.fresh = slot < 0;
    this.begin();
    return true;
  }

  begin() {
    if (this.wrote) this.stop++;
    this.wrote = false;
    this.looks++;
    if (this.bytes > this.most || this.stop > STOPS) this.runs = false;
  }

  // A value that a function returns.
  value(place, value) {
    if (typeof value === 'object' && this.on(place)) this.see(value);
    return value;
  }

  // A variable's value.
  see(value) {
    try {
      this.look(value, 0);
    } catch (error) { // whatever it is, the program goes on
      this.runs = false;
      fs.writeFileSync(path.join(folder, 'refused'), `its arrays cannot be read: ${error.message}`);
    }
  }

  look(value, depth) {
    if (value === null || typeof value !== 'object' || isProxy(value) || isAnyArrayBuffer(value)) return false;
    if (ArrayBuffer.isView(value)) return FLOATS.has(value.constructor?.name) && this.view(value);
    const isList = Array.isArray(value);
    if (isList && typeof value[0] === 'number') return this.numbers(value);
    if (depth === DEEP || (!isList && typeof value.then === 'function')) return false;
    return this.container(value, isList, depth);
  }

  container(value, isList, depth) {
    let known = this.containers.get(value);
    if (!known) this.containers.set(value, known = { due: 0, wait: 1, changes: -1 });
    if (this.looks < known.due) return false;
    const entries = isList ? value : value instanceof Map ? value.values() : own(value);
    let changed = false, count = 0;
    for (const each of entries) {
      if (++count > MANY) break;
      if (typeof each === 'object' && each !== null && this.look(each, depth + 1)) changed = true;
    }
    known.changes += changed;
    known.wait = changed ? 1 : Math.min(2 * known.wait, known.changes > 0 ? 1 : SELDOM);
    known.due = this.looks + known.wait;
    return changed;
  }

  room(bytes) {
    const base = this.next;
    this.next += Math.ceil(bytes / PAGE) * PAGE + PAGE;
    return base;
  }

  view(value) {
    const { buffer, byteOffset, byteLength } = value;
    if (byteLength < 16 || buffer.byteLength > LARGEST) return false;
    let known = this.buffers.get(buffer);
    if (!known || known.old.length < buffer.byteLength) {
      const old = new Uint8Array(Math.ceil(buffer.byteLength / 4) * 4);
      this.buffers.set(buffer, known = { base: this.room(old.length), old, views: new Map() });
    }
    const key = byteLength < 1 << 21 ? byteOffset * (1 << 21) + byteLength : `${byteOffset} ${byteLength}`;
    let entry = known.views.get(key);
    if (!entry) {
      const first = byteOffset - (byteOffset % 4), bytes = Math.min(Math.ceil((byteOffset + byteLength) / 4) * 4, buffer.byteLength) - first;
      entry = {
        address: known.base + first, now: new Uint8Array(buffer, first, bytes),
        old: known.old.subarray(first, first + bytes), due: 0, wait: 1, changes: -1,
      };
      known.views.set(key, entry);
    }
    return this.compare(entry);
  }

  numbers(value) {
    const { length } = value;
    if (length < 4 || length > LONG) return false;
    let entry = this.arrays.get(value);
    if (entry && this.looks < entry.due) return false;
    if (!entry || entry.room < length) { // one that has grown has room to grow on
      const room = entry ? 2 * length : length;
      entry = { values: new Float64Array(room), before: new Uint8Array(8 * room), room, address: this.room(8 * room), length: -1,
        due: 0, wait: 1, changes: -1 };
      this.arrays.set(value, entry);
    }
    if (entry.length !== length) {
      entry.length = length;
      entry.now = new Uint8Array(entry.values.buffer, 0, 8 * length);
      entry.old = entry.before.subarray(0, 8 * length);
    }
    for (let at = 0; at < length; at++) {
      if (typeof value[at] !== 'number') return false;
      entry.values[at] = value[at];
    }
    return this.compare(entry);
  }

  compare(entry) {
    if (this.looks < entry.due) return false;
    const { now, old } = entry, bytes = now.length;
    let changed = Buffer.compare(now, old) !== 0;
    if (changed) changed = this.changed(entry);
    entry.changes += changed;
    const seldom = bytes <= SMALL ? 1 : entry.changes > 0 ? Math.ceil(bytes / (16 * SMALL)) : SELDOM;
    entry.wait = changed ? 1 : Math.min(2 * entry.wait, seldom, SELDOM);
    entry.due = this.looks + entry.wait;
    return changed;
  }

  changed(entry) {
    const { now, old, address } = entry, bytes = now.length;
    const words = bytes >> 2;
    if (entry.changes < 0 && (bytes > LARGE || (words > WHOLE && bytes + WORD <= now.buffer.byteLength))) {
      entry.old = Uint8Array.from(now); // weights: rows of them that are taken for themselves are logged
      return false;
    }
    const [a, b] = [now, old].map((each) => new Uint32Array(each.buffer, each.byteOffset, words));
    let count = 0, first = -1, last = -1;
    const runs = [];
    for (let at = 0; at < words; at++) {
      if (a[at] === b[at]) continue;
      count++;
      if (first < 0) first = at;
      else if (at - last > GAP) {
        runs.push([first, last + 1]);
        first = at;
      }
      last = at;
    }
    const isFinished = 2 * count >= words || (this.fresh && (count >= ROW || count === entry.count));
    entry.count = isFinished ? 0 : count;
    if (!isFinished) return false; // a loop has written a part of it: more will follow, or it will be found as it is
    if (first >= 0) runs.push([first, last + 1]);
    for (const [start, end] of words <= WHOLE ? [[0, words]] : runs) this.write(address + 4 * start, now.subarray(4 * start, 4 * end));
    old.set(now);
    this.news++;
    return true;
  }

  write(address, bytes) {
    const head = Buffer.alloc(16);
    head.writeBigUInt64LE(BigInt(address), 0);
    head.writeUInt32LE(this.stop, 8);
    head.writeUInt32LE(bytes.length >> 2, 12);
    this.chunks[0].push(head);
    this.chunks[1].push(Buffer.from(bytes));
    this.bytes += bytes.length;
    this.waiting += bytes.length + head.length;
    this.wrote = true;
    if (this.waiting > this.room4) this.flush();
  }

  get room4() {
    return this.ended ? 0 : 1 << 20;
  }

  flush() {
    this.chunks.forEach((chunks, number) => {
      const all = Buffer.concat(chunks.splice(0));
      for (let at = 0; at < all.length;) at += writeSync(this.files[number], all, at);
    });
    this.waiting = 0;
  }
}
const { writeSync } = fs;

function* own(value) {
  for (const name of Object.keys(value)) yield Object.getOwnPropertyDescriptor(value, name)?.value;
}

// -- in the program's main thread; or in the one that loads its modules ------------------------------------------

let folder = '';
exports.initialize = (given) => {
  folder = given;
  firstPoint = POINTS;
};
exports.load = async (url, context, next) => asModule(url, await next(url, context));

function begin() {
  const asked = JSON.parse(process.env.LLAMADIFF_RECORD);
  delete process.env.LLAMADIFF_RECORD; // what the program starts in turn is not recorded
  if (asked.options === null) delete process.env.NODE_OPTIONS;
  else process.env.NODE_OPTIONS = asked.options;
  folder = asked.folder;
  if (parseInt(process.versions.node) < OLDEST) {
    fs.writeFileSync(path.join(folder, 'refused'), `node ${process.versions.node} is too old: ${OLDEST} is needed, or newer`);
    process.exit(0);
  }
  const recorder = new Recorder(asked.most);
  Object.defineProperty(globalThis, NAME, { value: recorder });
  process.setSourceMapsEnabled?.(true);
  process.on('exit', () => {
    recorder.flush();
    recorder.ended = true;
  });
  const compile = Module.prototype._compile;
  Module.prototype._compile = function (text, file, ...more) {
    return compile.call(this, more[0] === 'module' ? text : rewritten(text, file, pathToFileURL(file).href, isScript), file, ...more);
  };
  if (Module.registerHooks) Module.registerHooks({ load: (url, context, next) => asModule(url, next(url, context)) });
  else Module.register?.(pathToFileURL(__filename).href, { data: folder });
}
if (isMainThread && process.env.LLAMADIFF_RECORD) begin();
