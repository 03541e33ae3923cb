// Ollama: texts in, log-probabilities of what is generated out; no ids.
'use strict';
const path = require('path');
const { Refused } = require('../session');

const DEFAULTS = { temperature: 0.8, topK: 40, topP: 0.9, minP: 0, repeatPenalty: 1.1 };
const MOST = 20;

function details(session) {
  const { arch } = session.model.shape;
  return {
    parent_model: '', format: 'gguf', family: arch, families: [arch], parameter_size: `${session.parameters}`,
    quantization_level: path.basename(session.path, '.gguf').split('.').pop(),
  };
}

function card(session) {
  const { alias } = session.flags;
  return {
    name: alias, model: alias, modified_at: new Date(0).toISOString(), size: 0, digest: '', details: details(session),
  };
}

function show(session, body) {
  if ((body.model ?? body.name) !== session.flags.alias) throw new Refused(404, `model '${body.model}' not found`);
  const short = [...session.stated].filter(([, value]) => !Array.isArray(value));
  return {
    modelfile: `FROM ${session.path}`, parameters: '', template: session.tokens.template, details: details(session),
    model_info: Object.fromEntries(short), capabilities: ['completion'], modified_at: new Date(0).toISOString(),
  };
}

function named({ bytes, logprob }) { return { token: bytes.toString(), logprob, bytes: [...bytes] }; }

function logged(session, body, steps) {
  const top = body.top_logprobs ?? 0;
  if (!Number.isInteger(top) || top < 0 || top > MOST) {
    throw new Refused(400, `top_logprobs must be between 0 and ${MOST}`);
  }
  if (!body.logprobs) return {};
  return {
    logprobs: steps.map((step) => ({
      ...named(session.one(step.id, step.logs)),
      ...(top && { top_logprobs: session.top(step, top).map(named) }),
    })),
  };
}

// What both ways of asking have in common; `wrap` puts the text where it goes.
function generated(session, body, text, wrap) {
  if (body.model !== session.flags.alias) throw new Refused(404, `model '${body.model}' not found`);
  if (body.stream !== false) throw new Refused(400, 'this server does not stream: ask with "stream": false');
  const options = body.options ?? {};
  const ids = session.ids(text);
  const choice = { ...session.choice(options, DEFAULTS), count: options.num_predict ?? -1 };
  const { steps, end } = session.next(ids, choice);
  return {
    model: body.model, created_at: new Date().toISOString(), ...wrap(session.text(steps)), done: true,
    done_reason: end, total_duration: 1, load_duration: 1, prompt_eval_duration: 1, eval_duration: 1,
    ...(!session.flags.noUsage && { prompt_eval_count: ids.length, eval_count: steps.length }),
    ...logged(session, body, steps),
  };
}

function generate(session, body) {
  if (typeof body.prompt !== 'string') throw new Refused(400, 'prompt is a text');
  const turn = { role: 'user', content: body.prompt };
  const turns = body.system ? [{ role: 'system', content: body.system }, turn] : [turn];
  const text = body.raw ? body.prompt : session.rendered(turns);
  return generated(session, body, text, (response) => ({ response }));
}

function chat(session, body) {
  const wrap = (content) => ({ message: { role: 'assistant', content } });
  return generated(session, body, session.rendered(body.messages), wrap);
}

module.exports = {
  routes: {
    'GET /api/version': () => ({ version: '0.13.0' }),
    'GET /api/tags': (session) => ({ models: [card(session)] }),
    'POST /api/show': show,
    'POST /api/generate': generate,
    'POST /api/chat': chat,
  },
  refusal: (status, message) => ({ error: message }),
  modelName: (model) => `${path.basename(model, '.gguf').toLowerCase()}:latest`,
};
