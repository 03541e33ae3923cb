// Hostile answers that are JSON: a right answer, changed. Each takes an answer, and gives what is sent for it.
'use strict';

const NAN = '@NaN@'; // stands for what JSON.stringify cannot write
const [INFINITE, HUGE] = ['@Infinity@', '@1e999@'];
const ESCAPES = '\x1b[31m\x1b]0;owned\x07\r\n\u202e';

// A copy; `change` is asked for every member with the names above it, the nearest first. What is undefined goes.
function changed(value, change, names = []) {
  if (value === null || typeof value !== 'object') return value;
  const rows = Object.entries(value).map(([name, member]) => {
    const above = [name, ...names];
    return [name, change(changed(member, change, above), above)];
  }).filter(([, member]) => member !== undefined);
  return Array.isArray(value) ? rows.map(([, member]) => member) : Object.fromEntries(rows);
}

const isLog = (value, [name, above, top]) => typeof value === 'number'
  && (/^(log)?prob$/.test(name) || above === 'token_logprobs' || (top === 'top_logprobs' && name !== 'id'));
const isId = (value, [name, above]) => typeof value === 'number'
  && (name === 'id' || /^(tokens|(prompt_)?token_ids)$/.test(above));
const LISTS = /^(completion_probabilities|(top_|prompt_|token_)?logprobs|top_probs|content|tokens|text_offset)$/;
const isList = (value, [name]) => Array.isArray(value) && LISTS.test(name);
const isTop = (value, [name]) => Array.isArray(value) && /^top_(log)?probs$/.test(name)
  && value[0] && 'token' in value[0];
const isPositions = (value, names) => isList(value, names) && !isTop(value, names);
const isText = (value, [name, above]) => typeof value === 'string' && (name === 'token' || above === 'tokens');

// What `is` says is one becomes what `put` makes of it.
const where = (is, put) => (answer) => changed(answer, (value, names) => (is(value, names) ? put(value) : value));
const logs = (put) => where(isLog, put);

// In a list of this name objects go by tokens: each position's get other names.
function renamed(list, put) {
  const other = (row) => Object.fromEntries(Object.entries(row).map(([name, member]) => [put(name), member]));
  return where((value, [name]) => name === list && isPositions(value, [name]),
    (rows) => rows.map((row) => row && other(row)));
}

const texts = (put) => (answer) => renamed('top_logprobs', put)(where(isText, put)(answer));

function idsAre(id) {
  const asId = (text) => (/^token_id:/.test(text) ? `token_id:${id}` : text);
  return (answer) => renamed('prompt_logprobs', () => String(id))(texts(asId)(where(isId, () => id)(answer)));
}

const DEEP = 100000;

const EDITS = { // name -> sentence, the answer changed, its text changed
  // of the text of an answer
  malformed: ['JSON that ends in the middle.', null, (text) => text.slice(0, text.length >> 1)],
  nested: ['JSON that is nested 100,000 deep.', null, () => '['.repeat(DEEP) + ']'.repeat(DEEP)],
  'nested-objects': ['The right JSON, with objects 100,000 deep in it.', null,
    (text) => text.replace(/^\{/, `{"a": ${'{"a":'.repeat(DEEP)}1${'}'.repeat(DEEP)}, `)],
  'not-utf8': ['JSON that is not UTF-8.', null, (text) => Buffer.from(text.replace(/"(\w)/g, '"\xff\xfe$1'), 'latin1')],
  'utf-16': ['The right JSON in UTF-16.', null, (text) => Buffer.from(`\ufeff${text}`, 'utf16le')],
  'huge-number': ['A number of a million digits.', null, (text) => text.replace(/^\{/, `{"a": ${'9'.repeat(1e6)}, `)],
  // of log-probabilities
  nan: ['Log-probabilities are NaN.', logs(() => NAN)],
  infinity: ['Log-probabilities are Infinity.', logs(() => INFINITE)],
  'minus-infinity': ['Log-probabilities are -Infinity.', logs(() => `-${INFINITE}`)],
  overflow: ['Log-probabilities are 1e999.', logs(() => HUGE)],
  positive: ['Log-probabilities are positive.', logs((value) => Math.abs(value) + 0.5)],
  'all-zero': ['All log-probabilities are 0.', logs(() => 0)],
  'log-huge': ['Log-probabilities are -1e300.', logs(() => -1e300)],
  'log-text': ['Log-probabilities are texts.', logs(String)],
  'log-boolean': ['Log-probabilities are booleans.', logs(() => true)],
  // of ids
  'id-too-large': ['Ids are out of the vocabulary.', idsAre(2 ** 31 - 1)],
  'id-negative': ['Ids are negative.', idsAre(-5)],
  'id-fraction': ['Ids are fractions.', idsAre(1.5)],
  'id-huge': ['Ids are 1e300.', idsAre(1e300)],
  'id-boolean': ['Ids are booleans.', idsAre(true)],
  'id-text': ['Ids are texts.', idsAre('12')],
  // of what is there
  'fields-missing': ['Log-probabilities are left out.',
    where((v, n) => isLog(v, n) || n[0] === 'token_logprobs', () => undefined)],
  'top-missing': ['The likeliest tokens are left out.', where((v, [name]) => /^top_/.test(name), () => undefined)],
  'fields-null': ['Every field of the answer is null.', (answer) => changed(answer, () => null)],
  'logs-null': ['Log-probabilities, ids and texts of tokens are null.',
    where((v, n) => isLog(v, n) || isId(v, n) || isText(v, n), () => null)],
  'types-wrong': ['Lists are numbers, and the answer\'s other fields are lists.',
    (answer) => changed(answer, (value, names) => (isList(value, names) ? 7 : names.length === 1 ? [value] : value))],
  'lists-empty': ['Lists of tokens and of log-probabilities are empty.', where(isList, () => [])],
  'choices-empty': ['There are no choices.', where((v, [name]) => name === 'choices', () => [])],
  'answer-list': ['Every answer is an empty list.', () => []],
  'answer-number': ['Every answer is a number.', () => 7],
  'answer-null': ['Every answer is null.', () => null],
  // of tokens
  escapes: ['Texts of tokens hold escapes of terminals, newlines and a mark that turns text round.',
    texts((text) => ESCAPES + text)],
  'text-long': ['Texts of tokens are a million letters long.', texts((text) => text + 'x'.repeat(1e6))],
  'same-token': ['The same token is listed again and again.', where(isTop, (rows) => rows.map(() => rows[0]))],
  unsorted: ['The likeliest token is listed last.', where(isTop, (rows) => [...rows].reverse())],
  'positions-fewer': ['A position is missing.', where(isPositions, (rows) => rows.slice(0, -1))],
  'positions-more': ['The last position comes twice.', where(isPositions, (rows) => [...rows, ...rows.slice(-1)])],
  'positions-many': ['The last position comes 10,000 times.',
    where(isPositions, (rows) => [...rows, ...Array(1e4).fill(rows[rows.length - 1])])],
  'lists-uneven': ['Lists that belong together have different lengths.',
    where((v, [name]) => name === 'token_logprobs' || (name === 'bytes' && Array.isArray(v)), (rows) => rows.slice(1))],
  'key-in-tokens': ['Texts of tokens hold the key.', (answer, { authorization }) => texts(() => authorization)(answer)],
};

// The text of an answer, with what JSON has no words for.
function written(answer) {
  return (JSON.stringify(answer) ?? 'null').replace(/"(-?)@(NaN|Infinity|1e999)@"/g, '$1$2');
}

module.exports = { EDITS, written };
