// A conversation as a prompt: styles of chat templates, written by hand, chosen by what a template's text holds.
'use strict';

const chatml = { turn: (role, text) => `<|im_start|>${role}\n${text}<|im_end|>\n`, asks: '<|im_start|>assistant\n' };
const STYLES = [ // what is in the template's text, and how turns are written
  ['<|im_start|>', chatml],
  ['<|start_header_id|>', {
    turn: (role, text) => `<|start_header_id|>${role}<|end_header_id|>\n\n${text}<|eot_id|>`,
    asks: '<|start_header_id|>assistant<|end_header_id|>\n\n',
  }],
  ['[INST]', { whole: llama2 }],
  ["'Story: '", { turn: (role, text) => `${role === 'assistant' ? 'Story' : 'User'}: ${text}\n`, asks: 'Story:' }],
];
const SYSTEM = 'You are a helpful assistant.';

function llama2(messages) { // a system prompt is part of the first turn; BOS comes with the tokens
  const system = messages.filter(({ role }) => role === 'system').map(({ content }) => content).join('\n');
  let before = system ? `<<SYS>>\n${system}\n<</SYS>>\n\n` : '';
  return messages.filter(({ role }) => role !== 'system').map(({ role, content }) => {
    const turn = role === 'assistant' ? ` ${content} </s>` : `[INST] ${before}${content} [/INST]`;
    if (role !== 'assistant') before = '';
    return turn;
  }).join('');
}

function textOf(content) {
  return typeof content === 'string' ? content : content.map((part) => part.text ?? '').join('');
}

// The prompt, without BOS. Without a template in the file it is ChatML, as llama.cpp has it.
function render(template, given, how) {
  let messages = given.map(({ role, content }) => ({ role, content: textOf(content) }));
  if (how.templateLeftOut) return messages.map(({ content }) => content).join('\n');
  if (how.systemAdded) messages = [{ role: 'system', content: SYSTEM }, ...messages];
  const found = STYLES.find(([mark]) => template.includes(mark));
  const style = found ? found[1] : chatml;
  if (style.whole) return how.newlineEaten ? style.whole(messages).replaceAll('\n', '') : style.whole(messages);
  const eaten = (text) => (how.newlineEaten ? text.replaceAll('\n', '') : text);
  const turns = messages.map(({ role, content }) => style.turn(role, '\0').split('\0').map(eaten).join(content));
  return turns.join('') + eaten(style.asks);
}

module.exports = { render };
