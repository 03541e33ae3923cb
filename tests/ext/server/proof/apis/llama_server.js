// llama.cpp's llama-server: its own paths, and OpenAI's with log-probabilities in the form of chats.
'use strict';
const path = require('path');
const openai = require('./openai');
const { Refused } = require('../session');
const { validText, whole } = require('../text');

const DEFAULTS = { temperature: 0.8, topK: 40, topP: 0.95, minP: 0.05, repeatPenalty: 1 };

function props(session) {
  const { context, tokens, flags } = session;
  return {
    default_generation_settings: {
      id: 0, id_task: -1, n_ctx: context, speculative: false, is_processing: false,
      params: settings(session.choice({}, DEFAULTS), -1, 0), prompt: '',
    },
    total_slots: 1, model_alias: flags.alias, model_path: session.path, modalities: { vision: false, audio: false },
    chat_template: tokens.template, chat_template_caps: {}, bos_token: textOf(tokens, tokens.bos),
    eos_token: textOf(tokens, tokens.eos), build_info: 'b0-tests', is_sleeping: false,
  };
}

const textOf = (tokens, id) => (id == null ? '' : tokens.texts[id]);

function settings(choice, count, top) {
  return {
    n_predict: count, max_tokens: count, n_probs: top, seed: choice.seed ?? 4294967295, temperature: choice.temperature,
    top_k: choice.topK, top_p: choice.topP, min_p: choice.minP, repeat_penalty: choice.repeatPenalty,
    samplers: ['top_k', 'top_p', 'min_p', 'temperature'],
  };
}

function models(session) {
  const { context, model, parameters, tokens } = session;
  const [card] = openai.models(session).data;
  const meta = {
    vocab_type: { spm: 1, bpe: 2, none: 0 }[tokens.kind], n_vocab: model.vocabulary, n_ctx_train: context,
    n_embd: model.shape.width, n_params: parameters,
  };
  return { object: 'list', data: [{ ...card, owned_by: 'llamacpp', meta }] };
}

function tokenize(session, body) {
  const options = { add: body.add_special ?? false, parse: body.parse_special ?? true };
  const ids = body.content === undefined ? [] : session.ids(body.content, options);
  if (!body.with_pieces) return { tokens: ids };
  return { tokens: ids.map((id) => ({ id, piece: pieceOf(session.tokens.piece(id, true)) })) };
}

function pieceOf(bytes) { return whole(bytes) ? bytes.toString() : [...bytes]; }

function probabilities(session, steps, count, afterSampling) {
  const named = ({ id, bytes, logprob }) => ({
    id, token: validText(bytes), bytes: [...bytes],
    ...(afterSampling ? { prob: Math.exp(logprob) } : { logprob }),
  });
  return steps.map((step) => ({
    ...named(session.one(step.id, step.logs)),
    [afterSampling ? 'top_probs' : 'top_logprobs']: session.top(step, count).map(named),
  }));
}

function completion(session, body) {
  const { prompt } = body;
  if (prompt === undefined) throw new Refused(400, '"prompt" is missing');
  const several = Array.isArray(prompt) && prompt.some(Array.isArray) ? prompt : null;
  if (several) return several.map((each, index) => ({ ...completion(session, { ...body, prompt: each }), index }));
  const ids = session.ids(prompt, { add: true, parse: true });
  const [choice, count] = [session.choice(body, DEFAULTS), body.n_predict ?? body.max_tokens ?? -1];
  const [top, afterSampling] = [body.n_probs ?? body.logprobs ?? 0, body.post_sampling_probs ?? false];
  const { steps, end } = session.next(ids, { ...choice, count, afterSampling, ignoreEos: body.ignore_eos });
  const answer = {
    index: 0, content: session.text(steps), tokens: body.return_tokens ? steps.map(({ id }) => id) : [], id_slot: 0,
    stop: true, model: session.flags.alias, tokens_predicted: steps.length, tokens_evaluated: ids.length,
    generation_settings: settings(choice, count, top), prompt: session.tokens.text(ids, true), has_new_line: false,
    truncated: false, stop_type: end === 'stop' ? 'eos' : 'limit', stopping_word: '',
    tokens_cached: ids.length + steps.length - 1, timings: {},
  };
  if (top > 0 && steps.length) answer.completion_probabilities = probabilities(session, steps, top, afterSampling);
  return answer;
}

const TYPES = { 400: 'invalid_request_error', 401: 'authentication_error', 404: 'not_found_error' };

module.exports = {
  routes: {
    'GET /health': () => ({ status: 'ok' }),
    'GET /props': props,
    'POST /tokenize': tokenize,
    'POST /detokenize': (session, { tokens = [] }) => ({ content: session.tokens.text(session.listed(tokens), true) }),
    'POST /apply-template': (session, { messages }) => ({ prompt: session.rendered(messages) }),
    'POST /completion': completion,
    'POST /completions': completion,
    'GET /v1/models': models,
    'POST /v1/completions': (session, body) => openai.completion(session, body, { likeChat: true, defaults: DEFAULTS }),
    'POST /v1/chat/completions': (session, body) => openai.chat(session, body, { withIds: true, defaults: DEFAULTS }),
  },
  refusal: (status, message) => ({ error: { code: status, message, type: TYPES[status] || 'server_error' } }),
  modelName: (model) => path.basename(model),
};
