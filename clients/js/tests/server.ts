/** Real servers: `sandkeep serve` in a home of its own, stopped and removed at the end; one of them for all tests. */

import { execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type {} from 'vitest';
import type { TestProject } from 'vitest/node';

declare module 'vitest' {
  export interface ProvidedContext {
    url: string;
    key: string;
    /** Where a page is that may call the server from a browser. */
    page: string;
  }
}

const built = join(import.meta.dirname, '../dist');
const python = process.env['SANDKEEP_PYTHON'] ?? join(import.meta.dirname, '../../../.venv/bin/python');

export interface Served {
  url: string;
  /** Everything that it said so far. */
  said: string;
  end(signal: NodeJS.Signals): Promise<void>;
  /** End it and what it ran, and remove its home. */
  remove(): Promise<void>;
}

/** `sandkeep serve` with these options, once it answers. */
export async function serve(home: string, ...options: string[]): Promise<Served> {
  if (!existsSync(python)) throw new Error(`no ${python}: run make setup, or set SANDKEEP_PYTHON`);
  const env = { ...process.env, SANDKEEP_HOME: home, PYTHONUNBUFFERED: '1' };
  const server = spawn(python, ['-m', 'sandkeep', 'serve', '--port', '0', '--runtime', 'runc', ...options], { env });
  const ended = new Promise<void>((resolve) => server.once('exit', () => resolve()));
  const end = (signal: NodeJS.Signals) => (server.kill(signal), ended);
  const remove = async () => {
    await end('SIGKILL');
    for (const id of readdirSync(join(home, 'sandboxes'))) execFileSync(python, ['-m', 'sandkeep', 'sandbox', 'kill', id], { env });
    rmSync(home, { recursive: true, force: true });
  };
  const served: Served = { url: '', said: '', end, remove };
  await new Promise<void>((resolve, reject) => {
    const hear = (data: Buffer) => {
      served.said += data.toString();
      if (/serves on \S+\s/.test(served.said)) resolve();
    };
    server.stdout.on('data', hear);
    server.stderr.on('data', hear);
    server.once('exit', (code) => reject(new Error(`the server ended with ${code}: ${served.said}`)));
  });
  served.url = /serves on (\S+)/.exec(served.said)![1]!;
  return served;
}

/** The key that a server on a new database says once. */
export const firstKey = (served: Served): string => /shown once: (\S+)/.exec(served.said)![1]!;

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  const pages = await servePages();
  const page = `http://127.0.0.1:${(pages.address() as { port: number }).port}`;
  const served = await serve(mkdtempSync(join(tmpdir(), 'sk-js-')), '--sweep-interval', '0.2', '--cors-origin', page);
  project.provide('page', page);
  project.provide('url', served.url);
  project.provide('key', firstKey(served));
  return async () => {
    pages.closeAllConnections();
    pages.close();
    await served.remove();
  };
}

/** An empty page, and the built client beside it. */
async function servePages(): Promise<Server> {
  const server = createServer((request, answer) => {
    const name = /^\/((?:rest\/)?[a-z]+\.js)$/.exec(request.url ?? '')?.[1];
    if (name) answer.writeHead(200, { 'content-type': 'text/javascript' }).end(readFileSync(join(built, name)));
    else answer.writeHead(200, { 'content-type': 'text/html' }).end('<!doctype html><title>page</title>');
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  return server;
}
