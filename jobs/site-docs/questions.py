"""Claim: on the site each of 20 questions is answered two clicks from the first page, and search finds a word.

Needs mpitrain[docs] and Debian's package chromium; about a minute.
    python jobs/site-docs/questions.py [FOLDER FOR SCREENSHOTS]
"""

import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.browser import Browser  # noqa: E402

QUESTIONS = [
    # question, the link in the menu, the link on that page or "" if its top answers, what must stand there
    ("My run hangs", "When something is wrong", "a hang", "--now --stacks"),
    ("Every process is rank 0", "When something is wrong", "a wrong launcher, PMI or PMIx", "pmi2"),
    ("/dev/shm is full", "When something is wrong", "shared memory", "--shm-size"),
    ("No libmpi", "When something is wrong", "no MPI", "module of the site"),
    ("It is slow", "When something is wrong", "a slow run", "bench pairs"),
    ("How do I resume?", "Runs", "How a run ends", "--resume=auto"),
    ("Which keys has the optimizer?", "Keys", "optimizer", "optimizer.lr"),
    ("Options of launch", "Commands", "mpitrain launch", "--hosts"),
    ("How do I start my PyTorch program?", "PyTorch", "", "init_process_group"),
    ("A batch script", "Slurm, PBS and LSF", "", "--submit"),
    ("My own text", "Your own data", "", "text:book.txt"),
    ("Import a GPT-2 folder", "Fine-tuning and formats", "", "safetensors"),
    ("ZeRO", "Data, tensor and context parallelism, ZeRO", "ZeRO", "reduce-scatter"),
    ("What is 1F1B?", "Step by step", "1f1b", "one forward, one backward"),
    ("How does a ring work?", "Step by step", "ring", "bytes sent"),
    ("Slow links", "Benchmarks", "", "bench pairs"),
    ("Where did the time go?", "Where time goes", "Definitions", "bubble"),
    ("Which layout is fastest?", "Plans", "Which layout", "plan layout"),
    ("Words of DeepSpeed", "From other tools", "", "DeepSpeed"),
    ("A lecture", "Lessons", "A lecture of two hours", "minute"),
]
CLICK = """
(text => {
  const link = [...document.querySelectorAll("a")].find(a => a.textContent.trim() === text && a.href && !a.href.endsWith("#"));
  if (link) link.click();
  return !!link;
})
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        config = str(HERE / "mkdocs.yml")
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "-q",
            "--strict",
            "-f",
            config,
            "-d",
            folder,
        ]
        subprocess.run(command, check=True)
        handler = partial(Quiet, directory=folder)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser()
        try:
            wrong = asked(browser, f"http://127.0.0.1:{server.server_port}/")
        finally:
            browser.close()
            server.shutdown()
    print(f"{len(QUESTIONS) - len(wrong)} of {len(QUESTIONS)} questions are answered in two clicks")
    return len(wrong)


class Quiet(SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/favicon.ico":  # A browser asks for it, although no page does.
            self.path = "/img/favicon.ico"
        super().do_GET()

    def log_message(self, *_):
        pass


def asked(browser, home):
    """Return the questions that are not answered, and the word that search does not find."""
    shots, wrong = Path(sys.argv[1]) if len(sys.argv) > 1 else None, []
    browser.open(home, 1200)
    hits = """(query => {
      query.value = "gossip";
      query.dispatchEvent(new Event("keyup"));
      return document.querySelectorAll("#mkdocs-search-results article").length;
    })(document.getElementById("mkdocs-search-query"))"""
    for _ in range(50):
        if browser.value(hits):
            break
        time.sleep(0.1)
    else:
        wrong.append("gossip")
    for number, (question, *clicks, answer) in enumerate(QUESTIONS):
        browser.problems.clear()
        browser.open(home, 1200)
        followed = []
        for text in filter(None, clicks):
            followed.append(browser.value(f"{CLICK}({text!r})"))
            browser.settle()
        has_answer = browser.value(f"document.body.innerText.includes({answer!r})")
        is_right = all(followed) and has_answer and not browser.problems
        print(
            f"{'ok ' if is_right else 'BAD'} {question}: {' > '.join(filter(None, clicks))}",
            *browser.problems,
        )
        if not is_right:
            wrong.append(question)
        if shots:
            browser.picture(shots / f"{number + 1}.png")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
