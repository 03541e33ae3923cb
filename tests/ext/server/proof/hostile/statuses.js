// Hostile answers that are a status: what it is, more headers, and the body.
'use strict';

const html = '<!DOCTYPE html><html><body><h1>Internal Server Error</h1><p>nginx</p></body></html>';
const json = (message) => JSON.stringify({ error: { message } });
const late = (after) => () => ({ status: 429, headers: { 'Retry-After': after }, body: json('slow down') });

module.exports = {
  401: ['Every answer is 401.', () => ({ status: 401, body: json('the key is wrong') })],
  403: ['Every answer is 403.', () => ({ status: 403, body: json('forbidden') })],
  404: ['Every answer is 404.', () => ({ status: 404, body: '404 page not found' })],
  '429-soon': ['Every answer is 429, with Retry-After: 1.', late('1')],
  '429-late': ['Every answer is 429, with a Retry-After of a year.', late('31536000')],
  '429-date': ['Every answer is 429, with a date a minute ahead as Retry-After.',
    () => late(new Date(Date.now() + 60000).toUTCString())()],
  '429-nonsense': ['Every answer is 429, with a Retry-After that is none.', late('-1e999 soon')],
  500: ['Every answer is 500 with a page of HTML.',
    () => ({ status: 500, headers: { 'Content-Type': 'text/html' }, body: html })],
  503: ['Every answer is 503 without a body.', () => ({ status: 503, body: '' })],
  redirect: ['Every answer is 301 to elsewhere (--elsewhere).',
    ({ elsewhere }) => ({ status: 301, headers: { Location: elsewhere }, body: '' })],
  'redirect-307': ['Every answer is 307 to elsewhere, with which a request would be sent again.',
    ({ elsewhere }) => ({ status: 307, headers: { Location: elsewhere }, body: '' })],
  empty: ['Every answer is 200 without a body.', () => ({ status: 200, body: '' })],
  html: ['Every answer is 200 with a page of HTML.',
    () => ({ status: 200, headers: { 'Content-Type': 'text/html' }, body: html })],
  'key-echoed': ['Every answer is 500, and repeats the key in its message and in a header.',
    ({ authorization }) => ({ status: 500, headers: { 'X-Key': authorization }, body: json(`no: ${authorization}`) })],
};
