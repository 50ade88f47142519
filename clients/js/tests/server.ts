/** A real server for all tests: `sandkeep serve` in a home of its own, stopped and removed at the end. */

import { execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type {} from 'vitest';
import type { TestProject } from 'vitest/node';

declare module 'vitest' {
  export interface ProvidedContext {
    url: string;
    key: string;
  }
}

const python = process.env['SANDKEEP_PYTHON'] ?? join(import.meta.dirname, '../../../.venv/bin/python');

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  if (!existsSync(python)) throw new Error(`no ${python}: run make setup, or set SANDKEEP_PYTHON`);
  const home = mkdtempSync(join(tmpdir(), 'sk-js-'));
  const options = ['--port', '0', '--runtime', 'runc', '--sweep-interval', '0.2', '--cors-origin', 'http://page.test'];
  const server = spawn(python, ['-m', 'sandkeep', 'serve', ...options], { env: { ...process.env, SANDKEEP_HOME: home, PYTHONUNBUFFERED: '1' } });
  let said = '';
  const ended = new Promise<void>((resolve) => server.once('exit', () => resolve()));
  await new Promise<void>((resolve, reject) => {
    const hear = (data: Buffer) => {
      said += data.toString();
      if (/serves on \S+\s/.test(said)) resolve();
    };
    server.stdout.on('data', hear);
    server.stderr.on('data', hear);
    server.once('exit', (code) => reject(new Error(`the server ended with ${code}: ${said}`)));
  });
  project.provide('url', /serves on (\S+)/.exec(said)![1]!);
  project.provide('key', /shown once: (\S+)/.exec(said)![1]!);
  return async () => {
    server.kill('SIGKILL');
    await ended;
    for (const id of readdirSync(join(home, 'sandboxes'))) {
      execFileSync(python, ['-m', 'sandkeep', 'sandbox', 'kill', id], { env: { ...process.env, SANDKEEP_HOME: home } });
    }
    rmSync(home, { recursive: true, force: true });
  };
}
