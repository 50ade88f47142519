/** The REST client against a real server. */

import { afterAll, beforeAll, expect, inject, test } from 'vitest';
import { type RemoteSandbox, Sandkeep, SandkeepError } from '../src/index.js';

const server = new Sandkeep(inject('url'), { apiKey: inject('key') });
let sandbox: RemoteSandbox;

beforeAll(async () => {
  sandbox = await server.create({ env: { NAME: 'ann' }, metadata: { from: 'js' } });
});
afterAll(async () => {
  await sandbox.kill();
});

test('commands have exit codes, and keep the session', async () => {
  const result = await sandbox.commands.run('echo $NAME; echo oh >&2; cd /tmp; exit 3');
  expect(result).toMatchObject({ stdout: 'ann\n', stderr: 'oh\n', exit_code: 3, error_class: null });
  expect((await sandbox.commands.run('cat', { stdin: 'given' })).stdout).toBe('given');
  expect((await sandbox.commands.run('sleep 60', { timeout: 0.5 })).error_class).toBe('TIMEOUT');
});

test('output as it comes', async () => {
  const pieces: string[] = [];
  const result = await sandbox.commands.run('echo one; sleep 0.2; echo twö; echo oh >&2; exit 4', { onStdout: (text) => pieces.push(text) });
  expect(pieces.join('')).toBe('one\ntwö\n');
  expect(result).toMatchObject({ stdout: 'one\ntwö\n', stderr: 'oh\n', exit_code: 4 });
});

test('background processes', async () => {
  const process = await sandbox.commands.start('while read x; do echo "<$x>"; done');
  await process.writeToStdin('a\nb\n', { close: true });
  let text = '';
  for await (const piece of process.output()) text += piece.text;
  expect(text).toBe('<a>\n<b>\n');
  expect((await process.wait()).exit_code).toBe(0);
  const long = await sandbox.commands.start('sleep 1000');
  expect((await sandbox.commands.list()).find((one) => one.pid === long.pid)?.running).toBe(true);
  await long.kill();
  expect((await long.wait()).error_class).toBe('KILLED');
});

test('files', async () => {
  const bytes = new Uint8Array(300_000).map((_, i) => i % 251);
  const path = '/home/user/workspace/a b/ü.bin';
  expect((await sandbox.files.write(path, bytes)).size).toBe(bytes.length);
  expect(await sandbox.files.read(path)).toEqual(bytes);
  expect(await sandbox.files.read(path, { offset: 5, length: 3 })).toEqual(new Uint8Array([5, 6, 7]));
  await sandbox.files.write('/tmp/text', 'grüß');
  expect(await sandbox.files.readText('/tmp/text')).toBe('grüß');
  await sandbox.files.move('/tmp/text', '/tmp/other');
  expect(await sandbox.files.exists('/tmp/text')).toBe(false);
  await sandbox.files.mkdir('/tmp/folder');
  expect((await sandbox.files.list('/tmp')).map((one) => one.name)).toContain('folder');
  await sandbox.files.remove('/tmp/folder');
  await expect(sandbox.files.read('/none')).rejects.toMatchObject({ code: 'FILE_NOT_FOUND', status: 404 });
});

test('save points, sleep and wake, forks', async () => {
  await sandbox.files.write('/tmp/state', 'one');
  const snapshot = await sandbox.snapshot('first');
  const checkpoint = await sandbox.checkpoint({ comment: 'saved', tag: 'js' });
  await sandbox.files.write('/tmp/state', 'two');
  const fork = await sandbox.fork();
  await sandbox.restore(snapshot);
  expect(await sandbox.files.readText('/tmp/state')).toBe('one');
  expect(await fork.files.readText('/tmp/state')).toBe('two');
  await fork.kill();
  expect((await sandbox.pause()).state).toBe('PAUSED');
  expect((await sandbox.info()).state).toBe('PAUSED');
  expect((await sandbox.commands.run('cat /tmp/state')).stdout).toBe('one');
  await sandbox.pause();
  expect((await sandbox.resume()).state).toBe('RUNNING');
  expect((await server.checkpoints.list({ tag: 'js' })).map((one) => one.id)).toEqual([checkpoint.id]);
  expect(new TextDecoder().decode(await server.checkpoints.read(checkpoint.id, '/tmp/state'))).toBe('one');
  const copy = await server.create({ from_checkpoint: checkpoint.id });
  expect(await copy.files.readText('/tmp/state')).toBe('one');
  await copy.kill();
});

test('env, history, lists', async () => {
  await sandbox.setEnv({ MORE: '1' });
  expect(await sandbox.env()).toMatchObject({ NAME: 'ann', MORE: '1' });
  await sandbox.commands.run('echo for history');
  expect((await sandbox.history()).at(-1)?.command).toBe('echo for history');
  const ids: string[] = [];
  for await (const one of server.list()) ids.push(one.id);
  expect(ids).toContain(sandbox.id);
});

test('a terminal', async () => {
  const terminal = await sandbox.terminal({ cols: 100, rows: 30, command: 'stty size; read x; echo "got $x"; exit 5' });
  let screen = '';
  terminal.on('data', (data) => (screen += new TextDecoder().decode(data)));
  terminal.send('this\n');
  expect(await terminal.exited).toBe(5);
  expect(screen).toContain('30 100');
  expect(screen).toContain('got this');
});

test('errors have codes', async () => {
  await expect(server.sandbox('sb-000000000000').info()).rejects.toMatchObject({ code: 'SANDBOX_NOT_FOUND' });
  await expect(new Sandkeep(inject('url'), { apiKey: 'sk_no' }).create()).rejects.toMatchObject({ status: 401 });
  await expect(new Sandkeep('http://127.0.0.1:1').create()).rejects.toBeInstanceOf(SandkeepError);
});
