// A server of a model for the tests: right, with a mistake, or hostile.
//
//     node server.js MODEL [--api llama-server|openai|vllm|ollama] [--mistake NAME] [--hostile NAME] ...
//
// It listens on 127.0.0.1 and says `listening on PORT`. README.md lists the flags. A path that begins with
// /mistake/NAME or /hostile/NAME is answered as a server with that flag would: one process has them all.
'use strict';
const http = require('http');
const { read } = require('./flags');
const hostile = require('./hostile');
const mistakes = require('./mistakes');
const { Session, Refused } = require('./session');

const APIS = {
  'llama-server': './apis/llama_server', openai: './apis/openai', vllm: './apis/vllm', ollama: './apis/ollama',
};
const MOST_BYTES = 16 * 2 ** 20;

async function bodyOf(request) {
  const parts = [];
  let size = 0;
  for await (const part of request) {
    size += part.length;
    if (size > MOST_BYTES) throw new Refused(413, 'the request is too long');
    parts.push(part);
  }
  if (!size) return {};
  try {
    return JSON.parse(Buffer.concat(parts).toString());
  } catch {
    throw new Refused(400, 'the request is no JSON');
  }
}

// The path that a request is about, and the mistake or the hostile answer that is asked for.
function askedOf(url, given) {
  const [path] = url.split('?');
  const [, kind, name, rest] = path.match(/^\/(mistake|hostile)\/([^/]+)(\/.*)$/) || [];
  const known = kind && { mistake: mistakes, hostile }[kind].has(name);
  return known ? { path: rest, hostile: given, [kind]: name } : { path, hostile: given };
}

// What a request comes to: a status, and an answer as an object.
async function answered(service, request, { path, mistake, hostile: name }) {
  const { flags, api } = service;
  const body = await bodyOf(request);
  if (flags.key !== undefined && request.headers.authorization !== `Bearer ${flags.key}`) {
    throw new Refused(401, 'the key is missing or wrong');
  }
  if (flags.rateLimit && service.count % flags.rateLimit === 0) throw new Refused(429, 'too many requests');
  const handler = flags.without.includes(path) ? undefined : api.routes[`${request.method} ${path}`];
  if (!handler) throw new Refused(404, `there is no ${request.method} ${path} here`);
  if (body === null || typeof body !== 'object') throw new Refused(400, 'the request is no object');
  return { status: 200, answer: handler(service.session(mistake), name ? hostile.request(name, body) : body) };
}

function refused(api, error) {
  if (!(error instanceof Refused)) console.error(error);
  const status = error.status || 500;
  return { status, answer: api.refusal(status, error.message) };
}

async function serve(service, request, response) {
  const { flags, api } = service;
  service.count++;
  const asked = askedOf(request.url, service.count > flags.hostileAfter ? flags.hostile : undefined);
  const name = asked.hostile;
  const right = await answered(service, request, asked).catch((error) => refused(api, error));
  if (flags.delay) await new Promise((resolve) => { setTimeout(resolve, flags.delay); });
  if (name) {
    const about = { authorization: request.headers.authorization || 'no key', elsewhere: flags.elsewhere };
    return hostile.give(name, response, right, about);
  }
  return hostile.send(response, right.status, {
    'Content-Type': 'application/json; charset=utf-8',
    ...(right.status === 429 && { 'Retry-After': String(flags.retryAfter) }),
  }, Buffer.from(JSON.stringify(right.answer)));
}

// Of each mistake one session, made when it is first asked. The first one is run: what is used most gets compiled.
function sessions(flags) {
  const made = new Map();
  return (mistake) => {
    const names = mistake ? [mistake] : flags.mistake;
    const key = names.join();
    if (!made.has(key)) {
      const session = new Session(flags.model, mistakes.howOf(names), flags);
      if (!made.size) session.model.logits([0, 1, 0, 1, 0, 1, 0, 1]);
      session.model.forget();
      made.set(key, session);
    }
    return made.get(key);
  };
}

function main() {
  const flags = read(process.argv.slice(2));
  if (flags.listMistakes) return console.log(JSON.stringify(mistakes.listed()));
  if (flags.listHostile) return console.log(JSON.stringify(hostile.listed()));
  if (flags.hostile !== undefined && !hostile.has(flags.hostile)) {
    throw new Error(`no hostile answer is called ${flags.hostile}: --list-hostile lists them`);
  }
  if (!APIS[flags.api]) throw new Error(`--api ${flags.api}: there are ${Object.keys(APIS).join(', ')}`);
  const api = require(APIS[flags.api]);
  flags.alias ??= api.modelName(flags.model);
  const service = { flags, api, session: sessions(flags), count: 0 };
  service.session();
  if (flags.withParent) process.stdin.on('end', () => process.exit()).resume();
  const server = http.createServer((request, response) => serve(service, request, response));
  return server.listen(flags.port, '127.0.0.1', () => console.log(`listening on ${server.address().port}`));
}

try {
  main();
} catch (error) {
  console.error(`server.js: ${error.message}`);
  process.exit(2);
}
