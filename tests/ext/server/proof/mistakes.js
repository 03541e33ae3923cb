// Mistakes that the server can make: a name, a kind, a sentence, and what is done otherwise.
'use strict';

const MISTAKES = {
  tokens: [
    ['bos-twice', 'BOS comes twice at the start of a prompt.', { bosTimes: 2 }],
    ['bos-missing', 'BOS is missing at the start of a prompt.', { bosTimes: 0 }],
    ['special-as-text', 'Special tokens in a prompt are taken as text.', { specialAsText: true }],
    ['no-space-prefix', 'The space that the tokenizer puts before a text is missing.', { noSpacePrefix: true }],
    ['eos-appended', 'EOS is appended to a prompt.', { eosAppended: true }],
    ['template-left-out', 'Messages of a chat are joined without the chat template.', { templateLeftOut: true }],
    ['system-added', 'A system prompt that nobody asked for is added to a chat.', { systemAdded: true }],
    ['newline-eaten', 'The newlines of the chat template are eaten.', { newlineEaten: true }],
  ],
  settings: [
    ['rope-base', 'The base of RoPE is 500000, whatever the file states.', { ropeBase: 500000 }],
    ['rope-scaling', 'RoPE is scaled linearly by 2, which the file does not state.', { ropeScale: 2 }],
    ['window-8', 'A token sees no more than 8 keys.', { window: 8 }],
    ['context-shift', 'Of a prompt of more than 8 tokens the first half is dropped, except for BOS.', { room: 8 }],
    ['cache-q4_0', 'The KV cache is kept in 4 bits (Q4_0).', { cache: 'q4_0' }],
    ['requantized-q4_0', 'The matrices of the layers are quantized to Q4_0 once more.', { requantized: true }],
  ],
  engine: [
    ['rope-layout', 'RoPE turns halves for pairs, or the other way round.', { otherLayout: true }],
    ['rope-on-v', 'RoPE turns the values, too.', { ropeOnV: true }],
    ['rope-half', 'RoPE turns the first half of what it should turn.', { partlyRotated: true }],
    ['query-position', 'The position of queries is one too large.', { queryAhead: 1 }],
    ['norm-epsilon', 'The epsilon of the RMS norms is 1e-2.', { eps: 1e-2 }],
    ['norm-mean', 'Norms subtract the mean, as LayerNorm does.', { meanSubtracted: true }],
    ['output-norm-missing', 'The last norm is left out.', { outputNormMissing: true }],
    ['ffn-norm-missing', 'The norm before the feed-forward network is left out.', { ffnNormMissing: true }],
    ['attention-scale', 'Scores of attention are not divided by the root of the head size.', { scaleMissing: true }],
    ['mask-ahead', 'The causal mask is off by one: a token sees the next one.', { seesNext: true }],
    ['mask-behind', 'The causal mask is off by one: a token does not see itself.', { notItself: true }],
    ['gqa-modulo', 'Query head h reads KV head h modulo their number.', { headsByModulo: true }],
    ['gelu', 'The feed-forward network has GELU for SiLU.', { activation: 'gelu' }],
    ['gate-up-swapped', 'Gate and up of the feed-forward network are swapped.', { gateUpSwapped: true }],
    ['last-layer-skipped', 'The last layer is skipped.', { lastLayerSkipped: true }],
    ['residual-twice', 'In layer 1 the residual is added twice after attention.', { residualTwice: 1 }],
    ['residual-missing', 'In layer 1 the residual is not added after the feed-forward network.',
      { ffnResidualMissing: 1 }],
    ['embeddings-scaled', 'Embeddings are multiplied by the root of the width.', { embeddingsScaled: true }],
    ['softcap', 'Logits are capped softly at 30.', { softcap: 30 }],
  ],
};

const ALL = Object.entries(MISTAKES).flatMap(([kind, rows]) => (
  rows.map(([name, sentence, how]) => ({ name, kind, sentence, how }))));

// What is done otherwise by all mistakes of these names.
function howOf(names) {
  return Object.assign({}, ...names.map((name) => {
    const found = ALL.find((each) => each.name === name);
    if (!found) throw new Error(`no mistake is called ${name}: --list-mistakes lists them`);
    return found.how;
  }));
}

const has = (name) => ALL.some((each) => each.name === name);
const listed = () => ALL.map(({ name, kind, sentence }) => ({ name, kind, sentence }));

module.exports = { howOf, has, listed };
