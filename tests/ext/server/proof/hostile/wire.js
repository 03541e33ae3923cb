// Hostile answers that are bytes: what is written to the connection instead of an answer.
'use strict';
const zlib = require('zlib');

const OK = 'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n';
const FOREVER = 2 ** 40;

// Writes a chunk again and again, as fast as it is read, until the other side goes.
function repeat(socket, chunk, times = FOREVER) {
  let left = times;
  const write = () => {
    while (left-- > 0 && !socket.destroyed) if (!socket.write(chunk)) return;
    if (!socket.destroyed) socket.end();
  };
  socket.on('drain', write);
  write();
}

function byByte(socket, bytes, every) {
  let at = 0;
  const timer = setInterval(() => {
    if (socket.destroyed || at === bytes.length) return clearInterval(timer);
    return socket.write(bytes.subarray(at, ++at));
  }, every);
}

function ended(socket, head, body) {
  socket.write(`${OK}${head}\r\n`);
  socket.end(body);
}

function bomb(socket) { // members of 16 MiB each, as gzip allows; 16 GiB in all
  socket.write(`${OK}Content-Encoding: gzip\r\nConnection: close\r\n\r\n`);
  repeat(socket, zlib.gzipSync(Buffer.alloc(2 ** 24, ' '), { level: 9 }), 1024);
}

const filler = 'a'.repeat(2 ** 16);

module.exports = {
  'endless-body': ['The body never ends.', (socket) => {
    socket.write(`${OK}Connection: close\r\n\r\n{"content": "`);
    repeat(socket, filler);
  }],
  'endless-spaces': ['The body is spaces without end, in chunks of one byte.', (socket) => {
    socket.write(`${OK}Transfer-Encoding: chunked\r\n\r\n`);
    repeat(socket, '1\r\n \r\n'.repeat(1000));
  }],
  'endless-headers': ['Headers never end.', (socket) => {
    socket.write(OK);
    repeat(socket, `X-More: ${filler.slice(0, 1000)}\r\n`);
  }],
  'endless-header': ['One header never ends.', (socket) => {
    socket.write(`${OK}X-More: `);
    repeat(socket, filler);
  }],
  'endless-continue': ['"100 Continue" comes without end.', (socket) => {
    repeat(socket, 'HTTP/1.1 100 Continue\r\n\r\n'.repeat(100));
  }],
  'endless-chunk-size': ['The size of a chunk never ends.', (socket) => {
    socket.write(`${OK}Transfer-Encoding: chunked\r\n\r\n`);
    repeat(socket, '0'.repeat(2 ** 16));
  }],
  slow: ['The right answer, a byte a second.', (socket, bytes) => {
    byByte(socket, Buffer.from(`${OK}Content-Length: ${bytes.length}\r\n\r\n${bytes}`), 1000);
  }],
  never: ['No answer comes.', () => {}],
  'closed-at-once': ['The connection is closed without an answer.', (socket) => socket.destroy()],
  'closed-in-the-middle': ['The connection is closed in the middle of the body.', (socket, bytes) => {
    ended(socket, `Content-Length: ${bytes.length}\r\n`, bytes.subarray(0, bytes.length >> 1));
  }],
  'chunks-cut': ['The connection is closed before the last chunk.', (socket, bytes) => {
    ended(socket, 'Transfer-Encoding: chunked\r\n', `${bytes.length.toString(16)}\r\n${bytes}\r\n`);
  }],
  'length-too-long': ['Content-Length is larger than the body.', (socket, bytes) => {
    ended(socket, `Content-Length: ${bytes.length + 1000}\r\n`, bytes);
  }],
  'length-too-short': ['Content-Length is half of the body.', (socket, bytes) => {
    ended(socket, `Content-Length: ${bytes.length >> 1}\r\nConnection: close\r\n`, bytes);
  }],
  'length-huge': ['Content-Length is 10^18.', (socket, bytes) => {
    ended(socket, 'Content-Length: 1000000000000000000\r\n', bytes);
  }],
  'length-negative': ['Content-Length is negative.', (socket, bytes) => ended(socket, 'Content-Length: -5\r\n', bytes)],
  garbage: ['It does not speak HTTP.', (socket) => socket.end('\0\x01SSH-2.0 \xff\xfe no HTTP at all\n')],
  'gzip-bomb': ['A gzip bomb, though nobody asked for gzip.', bomb],
  'gzip-unasked': ['The right answer in gzip, though nobody asked for it.', (socket, bytes) => {
    const packed = zlib.gzipSync(bytes);
    ended(socket, `Content-Encoding: gzip\r\nContent-Length: ${packed.length}\r\n`, packed);
  }],
};
