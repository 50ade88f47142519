/** A sandbox whose host is gone, and another server on the same database and store. */

import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { Sandkeep } from '../src/index.js';
import { firstKey, serve } from './server.js';

test('it goes on from its last checkpoint when told to', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'sk-js-'));
  const shared = ['--database', `sqlite:///${folder}/sessions.db`, '--store', join(folder, 'store'), '--host-id'];
  const first = await serve(join(folder, 'a'), ...shared, 'a');
  try {
    const options = { apiKey: firstKey(first) };
    const made = await new Sandkeep(first.url, options).create({ auto_pause_timeout: 0 });
    await made.commands.run('echo saved > f; export WORD=kept');
    await made.checkpoint();
    await made.commands.run('echo later > later');
    await first.end('SIGTERM'); // it leaves, and what never sleeps runs on
    const second = await serve(join(folder, 'b'), ...shared, 'b');
    try {
      const sandbox = new Sandkeep(second.url, options).sandbox(made.id);
      await expect(sandbox.commands.run('id')).rejects.toMatchObject({ code: 'HOST_GONE', status: 503 });
      await expect(sandbox.resume()).rejects.toMatchObject({ code: 'HOST_GONE' });
      expect(await sandbox.resume({ fail_over: true })).toMatchObject({ state: 'RUNNING', host: 'b' });
      expect((await sandbox.commands.run('cat f; echo $WORD; ls')).stdout).toBe('saved\nkept\nf\n');
    } finally {
      await second.remove();
    }
  } finally {
    await first.remove();
    rmSync(folder, { recursive: true, force: true });
  }
});
