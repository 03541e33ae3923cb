// A model with its tokenizer: prompts as ids, log-probabilities, and what comes next. All APIs ask it.
'use strict';
const { open } = require('./gguf');
const { Model } = require('./model');
const { Tokenizer } = require('./tokens');
const { render } = require('./template');
const sampling = require('./sampling');

const LEAST = -9999; // said for a probability of 0, as JSON has no infinity

class Refused extends Error { // an answer that is no answer, and its status
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

class Session {
  constructor(path, how, flags) {
    const file = open(path);
    this.path = path;
    this.how = how;
    this.flags = flags;
    this.model = new Model(file, how, flags);
    this.tokens = new Tokenizer(file, how, this.model.vocabulary);
    this.context = this.model.shape.context;
    this.parameters = [...file.tensors.values()].reduce((sum, { shape }) => sum + shape.reduce((a, b) => a * b, 1), 0);
    this.stated = file.keys;
  }

  // Ids of a prompt as an API gives it: a text, ids, or both in a list.
  ids(prompt, options) {
    const parts = Array.isArray(prompt) ? prompt : [prompt];
    return parts.flatMap((part, i) => {
      if (typeof part === 'string') return this.tokens.encode(part, { ...options, ...(i && { add: false }) });
      if (this.flags.noIds) throw new Refused(400, 'this server takes prompts as texts only');
      return this.listed([part]);
    });
  }

  listed(ids) { // ids that are in the vocabulary
    const fine = (id) => Number.isInteger(id) && id >= 0 && id < this.model.vocabulary;
    if (!Array.isArray(ids)) throw new Refused(400, 'ids are a list');
    const other = ids.find((id) => !fine(id));
    if (other !== undefined) throw new Refused(400, `${JSON.stringify(other)} is no id of the vocabulary`);
    return ids;
  }

  rendered(messages) {
    const turn = (each) => each && typeof each.role === 'string' && each.content != null;
    if (!Array.isArray(messages) || !messages.every(turn)) throw new Refused(400, 'messages have a role and a content');
    return render(this.tokens.template, messages, this.how);
  }

  // What the model sees of a prompt: all, or less where it has too little room.
  seen(ids) {
    if (!this.how.room || ids.length <= this.how.room) return { ids, kept: 0, lost: 0 };
    const kept = ids[0] === this.tokens.bos ? 1 : 0;
    const lost = Math.floor((ids.length - kept) / 2);
    return { ids: [...ids.slice(0, kept), ...ids.slice(kept + lost)], kept, lost };
  }

  // Log-probabilities of every prompt token, given those before it; null for the first, and for what was dropped.
  ofPrompt(ids, options) {
    const { ids: seen, kept, lost } = this.seen(ids);
    const logits = this.model.logits(seen, [...seen.keys()]);
    return ids.map((id, i) => {
      const before = i - 1 - (i > kept ? lost : 0);
      if (i === 0 || before < 0 || (lost && i < kept + lost)) return null;
      return this.step(id, logits[before], ids.slice(0, i), options);
    });
  }

  // Tokens that come next, with their log-probabilities, and why they end.
  next(ids, options) {
    if (!ids.length) throw new Refused(400, 'the prompt is empty');
    if (ids.length > this.context) throw new Refused(400, `${ids.length} tokens do not fit into ${this.context}`);
    const { count, temperature, seed, ignoreEos } = options;
    const [steps, following] = [[], [...ids]];
    const draw = sampling.random(seed ?? Math.floor(Math.random() * 2 ** 32));
    const most = Math.min(count < 0 ? Infinity : count, this.context - ids.length);
    while (steps.length < most) {
      const [logits] = this.model.logits(this.seen(following).ids);
      const all = sampling.sampled(logits, following, options);
      const id = temperature <= 0 ? sampling.ordered(all)[0]
        : sampling.chosen(sampling.logProbabilities(all), draw);
      steps.push(this.step(id, logits, following, options));
      if (this.tokens.ends.has(id) && !ignoreEos) return { steps, end: 'stop' };
      following.push(id);
    }
    return { steps, end: 'length' };
  }

  // One position: the token that is there, and the log-probabilities of all.
  step(id, logits, before, options) {
    const cut = this.flags.sampled || options.afterSampling;
    return { id, logs: sampling.logProbabilities(cut ? sampling.sampled(logits, before, options) : logits) };
  }

  said(log) { // as it is written into an answer
    if (log === -Infinity) return LEAST;
    return this.flags.digits === undefined ? log : Number(log.toFixed(this.flags.digits));
  }

  // The likeliest tokens of a position: id, bytes, log-probability.
  top({ logs }, count) {
    const likely = sampling.ordered(logs).slice(0, count).filter((id) => logs[id] > -Infinity);
    return likely.map((id) => this.one(id, logs));
  }

  one(id, logs) { return { id, bytes: this.tokens.piece(id), logprob: this.said(logs[id]) }; }

  text(steps) { return this.tokens.text(steps.map(({ id }) => id)); }

  // How a request wants tokens to be chosen; a stubborn server has its own way.
  choice(body, defaults) {
    const asked = this.flags.stubborn ? {} : body;
    return {
      temperature: asked.temperature ?? defaults.temperature, topK: asked.top_k ?? defaults.topK,
      topP: asked.top_p ?? defaults.topP, minP: asked.min_p ?? defaults.minP,
      repeatPenalty: asked.repeat_penalty ?? asked.repetition_penalty ?? defaults.repeatPenalty, seed: body.seed,
    };
  }
}

module.exports = { Session, Refused };
