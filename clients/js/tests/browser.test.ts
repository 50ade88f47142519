/** The built client in a real Chromium, on a page of another origin than the server's. */

import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { type Browser, chromium as driver, type Page } from 'playwright-core';
import { afterAll, beforeAll, expect, inject, test } from 'vitest';
import type * as client from '../src/index.js';

const given = { url: inject('url'), key: inject('key') };
let browser: Browser;
let page: Page;

beforeAll(async () => {
  const cache = join(import.meta.dirname, '../node_modules/.chromium'); // where the package unpacks the browser, once
  mkdirSync(cache, { recursive: true });
  process.env['TMPDIR'] = cache;
  const { default: chromium } = await import('@sparticuz/chromium');
  browser = await driver.launch({ executablePath: await chromium.executablePath(), args: chromium.args, headless: true });
  page = await browser.newPage();
  await page.goto(inject('page'));
  await page.evaluate("import('/index.js').then((all) => { globalThis.sandkeep = all; })");
});
afterAll(async () => {
  await browser?.close();
});

type There = typeof globalThis & { sandkeep: typeof client };

test('a sandbox over the WebSocket protocol', async () => {
  const found = await page.evaluate(async ({ url, key }) => {
    const { Sandbox } = (globalThis as There).sandkeep;
    const one = await Sandbox.create(url, { enableCheckpoint: true, apiKey: key });
    const process = await one.exec('python', 'print(input()[::-1])');
    process.writeToStdin('äbc\n');
    const said = await process.stdout.readAll();
    await one.checkpoint();
    const two = await Sandbox.attach(url, one.sandboxId!, one.sandboxToken!);
    const again = await (await two.exec('bash', 'echo back')).stdout.readAll();
    await two.kill();
    return { said, again, states: [one.state, two.state] };
  }, given);
  expect(found).toEqual({ said: 'cbä\n', again: 'back\n', states: ['checkpointed', 'closed'] });
});

test('commands, files and a terminal over REST', async () => {
  const found = await page.evaluate(async ({ url, key }) => {
    const { Sandkeep } = (globalThis as There).sandkeep;
    const sandbox = await new Sandkeep(url, { apiKey: key }).create();
    try {
      const pieces: string[] = [];
      const result = await sandbox.commands.run('echo one; exit 3', { onStdout: (text) => pieces.push(text) });
      await sandbox.files.write('/tmp/x', new Uint8Array([0, 255, 1]));
      const bytes = [...(await sandbox.files.read('/tmp/x'))];
      const terminal = await sandbox.terminal({ command: 'read x; echo "<$x>"; exit 7' });
      let screen = '';
      terminal.on('data', (data) => (screen += new TextDecoder().decode(data)));
      terminal.send('hi\n');
      return { code: result.exit_code, pieces, bytes, exit: await terminal.exited, shown: screen.includes('<hi>') };
    } finally {
      await sandbox.kill();
    }
  }, given);
  expect(found).toEqual({ code: 3, pieces: ['one\n'], bytes: [0, 255, 1], exit: 7, shown: true });
});
