// Bytes of tokens as text: a token may be a part of a character.
'use strict';

const whole = (bytes) => Buffer.from(bytes.toString()).equals(bytes);

// Without a character that is cut off at the end, as llama-server writes it.
function validText(bytes) {
  let end = bytes.length;
  while (end && !whole(bytes.subarray(0, end))) end--;
  return bytes.toString('utf8', 0, end);
}

// Bytes that are no text are written out, as OpenAI does.
function namedText(bytes) {
  if (whole(bytes)) return bytes.toString();
  return `bytes:${Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, '0')}`).join('')}`;
}

module.exports = { whole, validText, namedText };
