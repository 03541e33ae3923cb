// OpenAI's API: completions with log-probabilities as lists, and chats with them as objects.
'use strict';
const path = require('path');
const { Refused } = require('../session');
const { namedText, validText } = require('../text');

const DEFAULTS = { temperature: 1, topK: 0, topP: 1, minP: 0, repeatPenalty: 1 };
const seconds = () => Math.floor(Date.now() / 1000);

function models(session) {
  return { object: 'list', data: [{ id: session.flags.alias, object: 'model', created: 0, owned_by: 'tests' }] };
}

function usage(session, prompts, generated) {
  if (session.flags.noUsage) return {};
  return { usage: { prompt_tokens: prompts, completion_tokens: generated, total_tokens: prompts + generated } };
}

function limited(session, count, name) {
  const most = session.flags.mostLogprobs;
  const fine = count == null || (Number.isInteger(count) && count >= 0 && count <= most);
  if (!fine) throw new Refused(400, `${name} must be between 0 and ${most}, not ${JSON.stringify(count)}`);
  return count;
}

// Several prompts, or one: a text, or ids.
function prompts(prompt) {
  if (prompt == null) throw new Refused(400, 'prompt is missing');
  const several = Array.isArray(prompt) && prompt.length && prompt.every((each) => typeof each !== 'number');
  return several ? prompt : [prompt];
}

function completion(session, body, { likeChat = false, defaults = DEFAULTS, named = textOfToken, more } = {}) {
  const top = limited(session, body.logprobs, 'logprobs');
  const [choice, count] = [session.choice(body, defaults), body.max_tokens ?? 16];
  let [evaluated, generated] = [0, 0];
  const choices = prompts(body.prompt).map((prompt, index) => {
    const ids = session.ids(prompt);
    const { steps, end } = session.next(ids, { ...choice, count });
    const before = body.echo ? echoed(session, ids, choice, top) : [];
    evaluated += ids.length;
    generated += steps.length;
    const all = [...before, ...steps];
    const wanted = likeChat ? chatLike(session, steps, top, { withIds: true }) : legacy(session, all, top, named);
    return {
      index, text: (body.echo ? session.tokens.text(ids, true) : '') + session.text(steps),
      logprobs: top == null || (likeChat && !top) ? null : wanted, finish_reason: end,
      ...(more && more(session, ids, steps, choice, body)),
    };
  });
  return {
    id: 'cmpl-0', object: 'text_completion', created: seconds(), model: body.model ?? session.flags.alias, choices,
    ...usage(session, evaluated, generated),
  };
}

function echoed(session, ids, choice, top) { // steps of the prompt; without log-probabilities where there are none
  const steps = top == null ? [] : session.ofPrompt(ids, choice);
  return ids.map((id, i) => steps[i] || { id, logs: null });
}

const textOfToken = (session, id) => namedText(session.tokens.piece(id, true));

function legacy(session, steps, top, named) {
  const found = { tokens: [], token_logprobs: [], top_logprobs: [], text_offset: [] };
  let offset = 0;
  for (const { id, logs } of steps) {
    found.tokens.push(named(session, id));
    found.token_logprobs.push(logs && session.said(logs[id]));
    found.top_logprobs.push(logs && likeliest(session, { id, logs }, top, named));
    found.text_offset.push(offset);
    offset += session.tokens.piece(id, true).toString().length;
  }
  return found;
}

// The likeliest and the one that is there; of tokens with the same text the likelier one.
function likeliest(session, step, top, named) {
  const found = {};
  const listed = [...session.top(step, top), session.one(step.id, step.logs)];
  for (const { id, logprob } of listed) found[named(session, id)] ??= logprob;
  return found;
}

// With ids they are llama-server's, which leaves out a character that is cut off.
function chatLike(session, steps, top, { withIds, asId }) {
  const textOf = asId ? ({ id }) => asId(session, id) : ({ bytes }) => (withIds ? validText : namedText)(bytes);
  const named = (each) => ({
    ...(withIds && { id: each.id }), token: textOf(each), logprob: each.logprob, bytes: [...each.bytes],
  });
  return {
    content: steps.map((step) => ({
      ...named(session.one(step.id, step.logs)), top_logprobs: session.top(step, top).map(named),
    })),
  };
}

function chat(session, body, { withIds = false, asId, defaults = DEFAULTS, more } = {}) {
  const top = limited(session, body.top_logprobs, 'top_logprobs');
  if (top != null && !body.logprobs) throw new Refused(400, 'top_logprobs needs logprobs to be true');
  const ids = session.ids(session.rendered(body.messages));
  const [choice, count] = [session.choice(body, defaults), body.max_completion_tokens ?? body.max_tokens ?? -1];
  const { steps, end } = session.next(ids, { ...choice, count });
  return {
    id: 'chatcmpl-0', object: 'chat.completion', created: seconds(), model: body.model ?? session.flags.alias,
    choices: [{
      index: 0, message: { role: 'assistant', content: session.text(steps) }, finish_reason: end,
      logprobs: body.logprobs ? chatLike(session, steps, top ?? (withIds ? 20 : 0), { withIds, asId }) : null,
    }],
    ...usage(session, ids.length, steps.length), ...(more && more(session, ids, steps, choice, body)),
  };
}

const TYPES = {
  400: 'invalid_request_error', 401: 'invalid_api_key', 404: 'not_found_error', 429: 'rate_limit_exceeded',
};

module.exports = {
  routes: {
    'GET /v1/models': models,
    'POST /v1/completions': (session, body) => completion(session, body),
    'POST /v1/chat/completions': (session, body) => chat(session, body),
  },
  refusal: (status, message) => ({
    error: { message, type: TYPES[status] || 'server_error', param: null, code: null },
  }),
  modelName: (model) => path.basename(model, '.gguf'),
  models, completion, chat, limited, DEFAULTS,
};
