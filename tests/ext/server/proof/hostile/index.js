// All hostile answers by their names: how they are listed, and how they are given.
'use strict';
const wire = require('./wire');
const statuses = require('./statuses');
const { EDITS, written } = require('./edits');

const OTHER = 'Something that was never asked.';
// Another request, to which the answer is given.
const ASKS = {
  'other-prompt': ['The answer is to another prompt than the one that was asked.', otherRequest],
};
const GROUPS = [wire, statuses, EDITS, ASKS];

function otherRequest(body) {
  const text = (prompt) => (Array.isArray(prompt) ? [...prompt].reverse() : OTHER);
  return {
    ...body, ...(body.prompt !== undefined && { prompt: text(body.prompt) }),
    ...(body.content !== undefined && { content: OTHER }),
    ...(body.messages && { messages: [{ role: 'user', content: OTHER }] }),
  };
}

function listed() {
  return GROUPS.flatMap((group) => Object.entries(group).map(([name, [sentence]]) => ({ name, sentence })));
}

const has = (name) => GROUPS.some((group) => Object.hasOwn(group, name));

// What is asked in place of a request.
const request = (name, body) => (ASKS[name] ? ASKS[name][1](body) : body);

// Gives a hostile answer: `right` is the right one's status and object, `about` what the request and the flags say.
function give(name, response, right, about) {
  if (wire[name]) {
    response.socket.on('error', () => {}); // the other side goes when it has enough
    wire[name][1](response.socket, Buffer.from(written(right.answer)));
  } else if (statuses[name]) {
    const { status, headers = {}, body } = statuses[name][1](about);
    send(response, status, { 'Content-Type': 'application/json', ...headers }, Buffer.from(body));
  } else {
    const [, edit, rewrite = (text) => text] = EDITS[name] || [];
    const answer = edit ? edit(right.answer, about) : right.answer;
    const body = Buffer.from(rewrite(written(answer)));
    send(response, right.status, { 'Content-Type': 'application/json' }, body);
  }
}

function send(response, status, headers, body) {
  response.writeHead(status, { ...headers, 'Content-Length': body.length });
  response.end(body);
}

module.exports = { listed, has, request, give, send };
