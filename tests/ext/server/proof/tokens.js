// Tokenizers that a file holds: SentencePiece's by scores, BPE's by merges on bytes, or none (prompts are ids).
'use strict';

const KINDS = { normal: 1, unknown: 2, control: 3, userDefined: 4, byte: 6 };
// How BPE cuts a text into words, by the name of the pre-tokenizer; _ stands for white space, and ~ for anything else.
const spaced = (pattern) => pattern.replaceAll('_', '\\p{White_Space}').replaceAll('~', '\\P{White_Space}');
const split = (pattern) => new RegExp(spaced(pattern), 'gu');
const SHORT = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])";
const REST = '[\r\n]*|_*[\r\n]+|_+(?!~)|_+';
const SPLITS = {
  'llama-bpe': split(`${SHORT}|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^_\\p{L}\\p{N}]+${REST}`),
  qwen2: split(`${SHORT}|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^_\\p{L}\\p{N}]+${REST}`),
  'gpt-2': split("'(?:s|t|re|ve|m|ll|d)| ?\\p{L}+| ?\\p{N}+| ?[^_\\p{L}\\p{N}]+|_+(?!~)|_+"),
};

// GPT-2 writes bytes that have no letter as letters from 256 on.
const LETTER_OF = (() => {
  let next = 256;
  const plain = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(plain(byte) ? byte : next++));
})();
const BYTE_OF = new Map(LETTER_OF.map((letter, byte) => [letter, byte]));

class Tokenizer {
  constructor(file, how, vocabulary) {
    const key = (name, otherwise) => file.keys.get(`tokenizer.${name}`) ?? otherwise;
    this.how = how;
    this.kind = { llama: 'spm', gpt2: 'bpe' }[key('ggml.model')] || 'none';
    this.pre = key('ggml.pre', 'default');
    this.texts = key('ggml.tokens', Array.from({ length: vocabulary }, (_, id) => `<${id}>`));
    this.types = key('ggml.token_type', []);
    this.scores = key('ggml.scores', []);
    this.ids = new Map(this.texts.map((text, id) => [text, id]));
    this.ranks = new Map(key('ggml.merges', []).map((pair, rank) => [pair, rank]));
    this.template = key('chat_template', '');
    this.bos = key('ggml.bos_token_id', this.kind === 'spm' ? 1 : null);
    this.eos = key('ggml.eos_token_id', this.kind === 'spm' ? 2 : null);
    this.addsBos = key('ggml.add_bos_token', this.kind === 'spm' || this.pre === 'llama-bpe');
    this.addsEos = key('ggml.add_eos_token', false);
    this.spacePrefix = this.kind === 'spm' && key('ggml.add_space_prefix', true) && !how.noSpacePrefix;
    const special = ({ id }) => [KINDS.unknown, KINDS.control, KINDS.userDefined].includes(this.types[id]);
    this.special = this.texts.map((text, id) => ({ text, id })).filter(special)
      .sort((a, b) => b.text.length - a.text.length);
    this.ends = new Set([this.eos, this.ids.get('<|im_end|>'), this.ids.get('<|eot_id|>')].filter((id) => id != null));
  }

  // Ids of a text. `add`: with BOS and EOS, where the file says so; `parse`: special tokens are no text.
  encode(text, { add = true, parse = true } = {}) {
    if (this.kind === 'none') throw new Error('this model has no tokenizer: give the prompt as ids');
    const begin = add ? this.beginning() : [];
    const end = add && (this.addsEos || this.how.eosAppended) ? [this.eos] : [];
    return [...begin, ...this.body(text, parse && !this.how.specialAsText), ...end];
  }

  beginning() {
    const times = this.how.bosTimes ?? (this.addsBos ? 1 : 0);
    return this.bos == null ? [] : Array(times).fill(this.bos);
  }

  body(text, parse) {
    const ids = [];
    let afterSpecial = true;
    for (const part of this.partition(text, parse)) {
      if (typeof part === 'number') ids.push(part);
      else if (this.kind === 'bpe') ids.push(...this.bpe(part));
      else ids.push(...this.spm((this.spacePrefix && afterSpecial ? ' ' : '') + part));
      afterSpecial = typeof part === 'number';
    }
    return ids;
  }

  partition(text, parse) { // texts, and ids of special tokens between them
    let parts = text ? [text] : [];
    for (const { text: name, id } of this.special) {
      if (!parse && this.types[id] !== KINDS.userDefined) continue;
      parts = parts.flatMap((part) => (typeof part === 'number' ? [part] : cut(part, name, id)));
    }
    return parts;
  }

  spm(text) {
    const score = (a, b) => {
      const id = this.ids.get(a + b);
      return id === undefined ? undefined : this.scores[id];
    };
    const parts = merged([...text.replaceAll(' ', '▁')], score);
    return parts.flatMap((part) => this.ids.get(part) ?? [...Buffer.from(part)].map((byte) => this.byteToken(byte)));
  }

  byteToken(byte) { return this.ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`); }

  bpe(text) {
    const words = text.match(SPLITS[this.pre] || SPLITS['gpt-2']) || [];
    return words.flatMap((word) => {
      const letters = Array.from(Buffer.from(word), (byte) => LETTER_OF[byte]);
      const whole = this.pre === 'llama-bpe' ? this.ids.get(letters.join('')) : undefined;
      if (whole !== undefined) return [whole];
      const rank = (a, b) => {
        const found = this.ranks.get(`${a} ${b}`);
        return found === undefined ? undefined : -found;
      };
      return merged(letters, rank).flatMap((part) => this.ids.get(part) ?? [...part].map((one) => this.ids.get(one)))
        .filter((id) => id !== undefined);
    });
  }

  // The bytes of a token; special ones have none, unless they are asked for.
  piece(id, special = false) {
    const [text, type] = [this.texts[id] ?? '', this.types[id] ?? KINDS.normal];
    if (type === KINDS.unknown || type === KINDS.control) return Buffer.from(special ? text : '');
    if (type === KINDS.userDefined || this.kind === 'none') return Buffer.from(text);
    if (type === KINDS.byte) return Buffer.from([parseInt(text.slice(3, 5), 16)]);
    if (this.kind === 'spm') return Buffer.from(text.replaceAll('▁', ' '));
    return Buffer.from([...text].flatMap((letter) => BYTE_OF.get(letter) ?? [...Buffer.from(letter)]));
  }

  text(ids, special = false) { return Buffer.concat(ids.map((id) => this.piece(id, special))).toString(); }
}

function cut(text, name, id) {
  return text.split(name).flatMap((part, i) => [...(i ? [id] : []), ...(part ? [part] : [])]);
}

// Joins the neighbours that are best by `worth`, the first of equals, until none are left that have any.
function merged(parts, worth) {
  const worths = parts.slice(1).map((part, i) => worth(parts[i], part));
  for (;;) {
    let best = -1;
    worths.forEach((each, i) => { if (each !== undefined && (best < 0 || each > worths[best])) best = i; });
    if (best < 0) return parts;
    parts.splice(best, 2, parts[best] + parts[best + 1]);
    worths.splice(best, 1);
    if (best > 0) worths[best - 1] = worth(parts[best - 1], parts[best]);
    if (best < worths.length) worths[best] = worth(parts[best], parts[best + 1]);
  }
}

module.exports = { Tokenizer };
