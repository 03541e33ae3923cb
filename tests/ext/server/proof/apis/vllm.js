// vLLM: OpenAI's API, log-probabilities of the prompt, ids as tokens, and its own /tokenize.
'use strict';
const openai = require('./openai');
const { Refused } = require('../session');

const VERSION = '0.11.0';

function models(session) {
  const card = {
    id: session.flags.alias, object: 'model', created: 0, owned_by: 'vllm', root: session.path, parent: null,
    max_model_len: session.context, permission: [],
  };
  return { object: 'list', data: [card] };
}

// A token alone, as vLLM writes it: what is no character is U+FFFD.
const textOf = (session, id) => session.tokens.piece(id, true).toString();
const asId = (session, id) => `token_id:${id}`;

// For each prompt token the likeliest ones and the one that is there, by their ids; null for the first.
function ofPrompt(session, ids, choice, top) {
  return session.ofPrompt(ids, choice).map((step) => {
    if (!step) return null;
    const there = { ...session.one(step.id, step.logs), rank: rankOf(step) };
    const listed = [...session.top(step, top).map((each, i) => ({ ...each, rank: i + 1 })), there];
    return Object.fromEntries(listed.map(({ id, logprob, rank }) => [
      id, { logprob, rank, decoded_token: textOf(session, id) }]));
  });
}

const rankOf = ({ id, logs }) => logs.reduce((rank, log) => rank + (log > logs[id] ? 1 : 0), 1);

function more(session, ids, steps, choice, body) {
  const top = openai.limited(session, body.prompt_logprobs, 'prompt_logprobs');
  return {
    prompt_logprobs: top == null ? null : ofPrompt(session, ids, choice, top),
    ...(body.return_token_ids && { prompt_token_ids: ids, token_ids: steps.map(({ id }) => id) }),
  };
}

function completion(session, body) {
  return openai.completion(session, body, { more, named: body.return_tokens_as_token_ids ? asId : textOf });
}

function chat(session, body) {
  return openai.chat(session, body, { more, asId: body.return_tokens_as_token_ids && asId });
}

function tokenize(session, body) {
  const text = body.messages ? session.rendered(body.messages) : body.prompt;
  if (typeof text !== 'string') throw new Refused(400, 'prompt is a text');
  const ids = session.ids(text, { add: body.add_special_tokens ?? true });
  return {
    count: ids.length, max_model_len: session.context, tokens: ids,
    token_strs: body.return_token_strs ? ids.map((id) => session.tokens.texts[id]) : null,
  };
}

module.exports = {
  ...openai,
  routes: {
    'GET /version': () => ({ version: VERSION }),
    'GET /health': () => ({}),
    'GET /v1/models': models,
    'POST /v1/completions': completion,
    'POST /v1/chat/completions': chat,
    'POST /tokenize': tokenize,
    'POST /detokenize': (session, { tokens }) => ({ prompt: session.tokens.text(session.listed(tokens), true) }),
  },
  refusal: (status, message) => ({ error: { message, type: 'BadRequestError', param: null, code: status } }),
  modelName: (model) => model,
};
