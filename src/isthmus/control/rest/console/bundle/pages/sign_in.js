// Sign in with a token. The token stays in memory until it is sent, and is kept nowhere.

import { signIn } from "../lib/api.js";
import { useAction } from "../lib/live.js";
import { html, Problem, useEffect, useRef } from "../lib/ui.js";

export function SignInPage({ ended }) {
  const field = useRef(null);
  const { busy, error, run } = useAction();
  useEffect(() => {
    document.title = "Sign in - Isthmus";
    field.current.focus();
  }, []);
  const submit = (event) => {
    event.preventDefault();
    run(() => signIn(field.current.value.trim())).finally(() => {
      if (field.current) field.current.value = "";
    });
  };
  return html`<main class="signin">
    <p class="brand">Isthmus</p>
    <h1>Sign in</h1>
    <p class="lead">With a token of the pool: ${html`<code>isthmus token create --user NAME</code>`}</p>
    <section aria-label="Sign in"><form onSubmit=${submit}>
      ${ended && html`<p role="status">The session has ended. Sign in again.</p>`}
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" required spellcheck="false" maxlength="400"/>
      <div class="row"><button disabled=${busy}>Sign in</button></div>
      <${Problem} error=${error}/>
    </form></section>
    <p class="hint">A session ends after 12 hours, when you sign out, or when its token is revoked.</p>
  </main>`;
}
