// The command line: flags with a value, and flags without.
'use strict';

const NUMBERS = { // flag -> what it is if it is not given
  port: 0, digits: undefined, 'most-logprobs': 20, 'rate-limit': 0, 'retry-after': 1, delay: 0, 'hostile-after': 0,
};
const TEXTS = {
  api: 'llama-server', key: undefined, hostile: undefined, cache: 'f16', alias: undefined, elsewhere: '',
};
const LISTS = ['mistake', 'without'];
const SWITCHES = ['no-ids', 'no-usage', 'sampled', 'stubborn', 'exact', 'with-parent', 'list-mistakes', 'list-hostile'];

const named = (flag) => flag.replace(/-(.)/g, (_, letter) => letter.toUpperCase());

function read(words) {
  const found = { model: undefined };
  Object.entries({ ...NUMBERS, ...TEXTS }).forEach(([flag, value]) => { found[named(flag)] = value; });
  LISTS.forEach((flag) => { found[named(flag)] = []; });
  for (let i = 0; i < words.length; i++) {
    const flag = words[i].replace(/^--/, '');
    if (flag === words[i]) found.model = flag;
    else if (SWITCHES.includes(flag)) found[named(flag)] = true;
    else if (words[i + 1] === undefined) throw new Error(`--${flag} needs a value`);
    else if (LISTS.includes(flag)) found[named(flag)].push(words[++i]);
    else if (flag in NUMBERS) found[named(flag)] = numberOf(flag, words[++i]);
    else if (flag in TEXTS) found[named(flag)] = words[++i];
    else throw new Error(`there is no --${flag}`);
  }
  return found;
}

function numberOf(flag, word) {
  if (!/^\d+$/.test(word)) throw new Error(`--${flag} ${word}: not a whole number`);
  return Number(word);
}

module.exports = { read };
