/** Requests to the REST API: the key, JSON both ways, errors as the server's codes. */

export interface ServerOptions {
  apiKey?: string;
  fetch?: typeof fetch;
  /** For the `ws` package in Node. */
  wsOptions?: Record<string, unknown>;
}

/** An error of the server, or of reaching it (`SERVER_UNREACHABLE`). */
export class SandkeepError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly remedy = '',
    readonly status = 0,
    readonly details: Record<string, unknown> = {},
    options?: ErrorOptions,
  ) {
    super(message, options);
    this.name = 'SandkeepError';
  }

  static of(told: Record<string, unknown>, status = 0): SandkeepError {
    const { code, message, remedy, details } = told;
    return new SandkeepError(String(code ?? 'SANDKEEP_ERROR'), String(message ?? ''), String(remedy ?? ''), status, (details ?? {}) as Record<string, unknown>);
  }
}

export type Query = Record<string, string | number | boolean | undefined>;

export class Http {
  readonly #fetch: typeof fetch;

  constructor(
    readonly url: string,
    readonly options: ServerOptions,
  ) {
    this.#fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
  }

  async json<T>(method: string, path: string, body?: object, query: Query = {}): Promise<T> {
    const init: RequestInit = body === undefined ? {} : { body: JSON.stringify(body), headers: { 'content-type': 'application/json' } };
    const answer = await this.raw(method, path, init, query);
    return (answer.status === 204 ? undefined : await answer.json()) as T;
  }

  async raw(method: string, path: string, init: RequestInit = {}, query: Query = {}): Promise<Response> {
    const url = new URL(this.url.replace(/\/$/, '') + path);
    for (const [name, value] of Object.entries(query)) {
      if (value !== undefined) url.searchParams.set(name, String(value));
    }
    const headers = new Headers(init.headers);
    if (this.options.apiKey) headers.set('authorization', `Bearer ${this.options.apiKey}`);
    let answer: Response;
    try {
      answer = await this.#fetch(url, { ...init, method, headers });
    } catch (cause) {
      throw new SandkeepError('SERVER_UNREACHABLE', `no answer from ${url.origin}`, 'is the server running?', 0, {}, { cause });
    }
    if (answer.ok) return answer;
    const told: unknown = await answer.json().catch(() => ({}));
    throw SandkeepError.of((told ?? {}) as Record<string, unknown>, answer.status);
  }
}

/** Server-sent events of an answer: name and data. */
export async function* events(answer: Response): AsyncGenerator<[string, Record<string, unknown>]> {
  if (!answer.body) return;
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const blocks = rest.split('\n\n');
      rest = blocks.pop() ?? '';
      for (const block of blocks) {
        const field = (name: string) => block.split('\n').find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
        const data = field('data');
        if (data !== undefined) yield [field('event') ?? 'message', JSON.parse(data) as Record<string, unknown>];
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
