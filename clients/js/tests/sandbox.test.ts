/** The WebSocket client against a real server. */

import { afterEach, expect, inject, test } from 'vitest';
import { WebSocketServer } from 'ws';
import { Sandbox, SandboxError, type CreateOptions, type SandboxState } from '../src/index.js';
import { Proxy } from './proxy.js';

const url = inject('url');
const open: Sandbox[] = [];

async function created(...options: Parameters<typeof Sandbox.create> extends [string, ...infer R] ? R : never): Promise<Sandbox> {
  const sandbox = await Sandbox.create(url, ...options);
  open.push(sandbox);
  return sandbox;
}

async function output(sandbox: Sandbox, code: string): Promise<string> {
  const process = await sandbox.exec('bash', code);
  return process.stdout.readAll();
}

afterEach(async () => {
  await Promise.all(open.splice(0).map((one) => one.kill()));
});

test('create, execute, both streams', async () => {
  const sandbox = await created();
  expect(sandbox.state).toBe('running');
  expect(sandbox.sandboxId).toBeTruthy();
  expect(sandbox.sandboxToken).toBeTruthy();
  const process = await sandbox.exec('python', 'import sys; print("hi é😀"); print("oh", file=sys.stderr)');
  const live: string[] = [];
  process.stdout.onData((text) => live.push(text));
  await process.wait();
  expect(await process.stdout.readAll()).toBe('hi é😀\n');
  expect(await process.stderr.readAll()).toBe('oh\n');
  expect(() => process.writeToStdin('late')).toThrow();
});

test('input, iteration, kill', async () => {
  const sandbox = await created();
  const process = await sandbox.exec('bash', 'while read x; do echo "<$x>"; done');
  process.writeToStdin('a\n');
  for await (const piece of process.stdout) {
    expect(piece).toBe('<a>\n');
    break;
  }
  await expect(sandbox.exec('bash', 'echo no')).rejects.toThrow('already in progress');
  const begun = Date.now();
  await process.kill();
  expect(process.done).toBe(true);
  expect(Date.now() - begun).toBeLessThan(60_000);
  expect(await output(sandbox, 'echo next')).toBe('next\n');
});

test('checkpoint ends this object, attach comes back', async () => {
  const sandbox = await created({ enableCheckpoint: true });
  await output(sandbox, 'echo kept > /root/file');
  const states: SandboxState[] = [];
  sandbox.on('state', (state) => states.push(state));
  let told = false;
  sandbox.once('checkpointed', () => (told = true));
  await sandbox.checkpoint();
  expect(told).toBe(true);
  expect(states).toEqual(['checkpointing', 'checkpointed']);
  await expect(sandbox.exec('bash', 'echo')).rejects.toThrow('checkpointed');
  await expect(sandbox.checkpoint()).rejects.toThrow('checkpointed');
  await expect(sandbox.snapshotFilesystem('x')).rejects.toThrow('checkpointed');
  const again = await Sandbox.attach(url, sandbox.sandboxId!, sandbox.sandboxToken!);
  open.push(again);
  expect(await output(again, 'cat /root/file')).toBe('kept\n');
});

test('checkpoint while something executes is refused and changes nothing', async () => {
  const sandbox = await created({ enableCheckpoint: true });
  const process = await sandbox.exec('bash', 'read x; echo $x');
  await expect(sandbox.checkpoint()).rejects.toMatchObject({ message: 'SANDBOX_EXECUTION_IN_PROGRESS_ERROR' });
  expect(sandbox.state).toBe('running');
  process.writeToStdin('on\n');
  expect(await process.stdout.readAll()).toBe('on\n');
  await sandbox.checkpoint();
});

test('checkpoint that was not enabled', async () => {
  const sandbox = await created();
  const error: unknown = await sandbox.checkpoint().catch((caught: unknown) => caught);
  expect(error).toBeInstanceOf(SandboxError);
  expect((error as SandboxError).message).toBe('SANDBOX_CHECKPOINT_ERROR');
  expect((error as SandboxError).detail).toContain('Failed to checkpoint');
  expect(sandbox.state).toBe('failed');
  open.push(await Sandbox.attach(url, sandbox.sandboxId!, sandbox.sandboxToken!));
});

test('errors are the statuses', async () => {
  await expect(Sandbox.create(url, { enableSandboxHandoff: true })).rejects.toThrow('SANDBOX_CREATION_ERROR');
  await expect(Sandbox.create(url, { filesystemSnapshotName: 'nowhere' })).rejects.toMatchObject({ detail: expect.stringContaining('Filesystem snapshot not found') as string });
  await expect(Sandbox.attach(url, 'sb-000000000000', 'x')).rejects.toThrow('SANDBOX_NOT_FOUND');
  const sandbox = await created();
  await expect(Sandbox.attach(url, sandbox.sandboxId!, 'wrong')).rejects.toThrow('SANDBOX_PERMISSION_DENIAL_ERROR');
  await expect(Sandbox.attach(url, sandbox.sandboxId!, sandbox.sandboxToken!)).rejects.toThrow('SANDBOX_IN_USE');
  await expect(sandbox.exec('ruby' as 'bash', '1')).rejects.toThrow('SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR');
  expect(await output(sandbox, 'echo fine')).toBe('fine\n');
  await expect(Sandbox.create('ws://127.0.0.1:1')).rejects.toThrow('no connection');
});

test('snapshots of the filesystem', async () => {
  const sandbox = await created();
  await output(sandbox, 'echo first > /root/file');
  await sandbox.snapshotFilesystem('from-js');
  await expect(sandbox.snapshotFilesystem('../x')).rejects.toThrow('SANDBOX_FILESYSTEM_SNAPSHOT_ERROR');
  expect(sandbox.state).toBe('running');
  const other = await created({ filesystemSnapshotName: 'from-js' });
  expect(await output(other, 'cat /root/file')).toBe('first\n');
});

test('kill, and what comes after', async () => {
  const sandbox = await created();
  const process = await sandbox.exec('bash', 'sleep 1000');
  let killed = false;
  sandbox.once('killed', () => (killed = true));
  await sandbox.kill();
  expect(killed).toBe(true);
  expect(sandbox.state).toBe('closed');
  await expect(process.wait()).rejects.toBeInstanceOf(SandboxError);
  await expect(Sandbox.attach(url, sandbox.sandboxId!, sandbox.sandboxToken!)).rejects.toThrow('SANDBOX_NOT_FOUND');
});

test('an idle sandbox is deleted, and the client is told', async () => {
  const sandbox = await created({ idleTimeout: 3 });
  await new Promise<void>((resolve) => sandbox.once('deleted', resolve));
  expect(sandbox.state).toBe('closed');
  await expect(sandbox.exec('bash', 'echo')).rejects.toThrow('closed');
});

test('an idle sandbox that may be checkpointed sleeps; its work is there when it wakes', async () => {
  const sandbox = await Sandbox.create(url, { idleTimeout: 3, enableCheckpoint: true });
  await output(sandbox, 'echo unsaved > /root/work');
  await new Promise<void>((resolve) => sandbox.once('deleted', resolve));
  const again = await Sandbox.attach(url, sandbox.sandboxId!, sandbox.sandboxToken!);
  expect(await output(again, 'cat /root/work')).toBe('unsaved\n');
  await again.kill();
});

test('a time-out that nobody gave is not sent: the server then deletes nothing', async () => {
  const server = new WebSocketServer({ port: 0, host: '127.0.0.1' });
  await new Promise((resolve) => server.once('listening', resolve));
  const first = async (options: CreateOptions) => {
    const said = new Promise<Record<string, unknown>>((resolve) =>
      server.once('connection', (socket) => socket.once('message', (data) => (resolve(JSON.parse(String(data))), socket.close(4000)))),
    );
    const { port } = server.address() as { port: number };
    await Sandbox.create(`ws://127.0.0.1:${port}`, options).catch(() => undefined);
    return said;
  };
  expect(await first({ enableCheckpoint: true })).not.toHaveProperty('idle_timeout');
  expect(await first({})).not.toHaveProperty('idle_timeout');
  expect(await first({ idleTimeout: 7 })).toHaveProperty('idle_timeout', 7);
  server.close();
});

test('handoff', async () => {
  const one = await created({ enableCheckpoint: true, enableSandboxHandoff: true });
  const gone = new Promise<void>((resolve) => one.once('checkpointed', resolve));
  const two = await Sandbox.attach(url, one.sandboxId!, one.sandboxToken!);
  await gone;
  expect(one.state).toBe('checkpointed');
  expect(await output(two, 'echo mine')).toBe('mine\n');
  await two.kill();
});

test('a lost connection is replaced; output comes once, input is not lost', async () => {
  const proxy = await Proxy.start(url);
  try {
    const sandbox = await Sandbox.create(proxy.url, { enableAutoReconnect: true, backoff: { first: 20, most: 200 } });
    open.push(sandbox);
    const process = await sandbox.exec('bash', 'i=0; while [ $i -lt 20000 ]; do i=$((i+1)); echo $i; done; read x; echo "end $x"');
    let seen = '';
    let cuts = 0;
    process.stdout.onData((text) => {
      seen += text;
      if (cuts < 4 && seen.length > (cuts + 1) * 15_000) {
        cuts++;
        proxy.cut();
      }
      if (seen.endsWith('\n20000\n')) {
        sandbox.once('reconnecting', () => process.writeToStdin('here\n'));
        proxy.cut();
      }
    });
    let lost = 0;
    sandbox.on('reconnecting', () => lost++);
    const expected = Array.from({ length: 20_000 }, (_, i) => `${i + 1}\n`).join('') + 'end here\n';
    expect(await process.stdout.readAll()).toBe(expected);
    expect(lost).toBeGreaterThan(0);
    expect(sandbox.state).toBe('running');
    expect(await output(sandbox, 'echo next')).toBe('next\n');
  } finally {
    await proxy.stop();
  }
});

test('with the server down the attempts are few, and end', async () => {
  const proxy = await Proxy.start(url);
  const sandbox = await Sandbox.create(proxy.url, { enableAutoReconnect: true, backoff: { first: 20, most: 300, giveUpAfter: 1500 } });
  const failed = new Promise<SandboxError>((resolve) => sandbox.once('failed', resolve));
  await proxy.refuse();
  expect((await failed).status).toBe('SANDBOX_ERROR');
  expect(sandbox.state).toBe('failed');
  expect(proxy.attempts).toBeLessThan(60);
  await proxy.stop();
});
