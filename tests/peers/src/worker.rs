//! Stores whose clients are Python's: `worker.py` makes and times their calls, in a process of its own, in its turn.

use std::{
    cell::RefCell,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{ChildStdin, ChildStdout, Command, Stdio},
    rc::Rc,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::Signal,
};
use serde::{Deserialize, Serialize};

use crate::{
    child::Server,
    failure::{During, Failure, Result},
    job::{Job, Op, Shape},
    store::{Limits, Peer},
};

/// How long an answer may take: a burst is some seconds at most.
const PATIENCE: Timespec = Timespec { tv_sec: 90, tv_nsec: 0 };

/// A process that serves one kind of store.
#[derive(Debug)]
pub struct Worker {
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    server: Server,
    /// Whether it is stopped while it is not asked.
    rests: bool,
    /// Why it cannot be asked any more.
    lost: Option<Failure>,
    /// What it says that it is.
    pub version: String,
}

/// What is asked, as a line of JSON.
#[derive(Debug, Serialize)]
struct Question<'a> {
    #[serde(rename = "do")]
    act: &'static str,
    mode: &'a str,
    op: &'static str,
    values: usize,
    bytes: usize,
    budget_ms: u64,
    least: usize,
    most: usize,
}

/// What is answered.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Answer {
    error: Option<String>,
    version: String,
    us: Vec<f64>,
}

impl Worker {
    /// Starts `script` for a store of this kind, whose values have at most `most` bytes. One that `rests` is stopped while it
    /// is not asked: its threads would take processors from the others when it is their turn.
    pub fn start(
        python: &Path,
        script: &Path,
        kind: &'static str,
        rests: bool,
        dir: &Path,
        most: usize,
    ) -> Result<Self> {
        let mut command = Command::new(python);
        command.arg("-u").arg(script).args([kind, &most.to_string()]).arg(dir);
        let mut server = Server::start(kind, dir, command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let (stdin, stdout) = server.pipes().ok_or(Failure(format!("{kind} has no pipes")))?;
        let stdout = BufReader::new(stdout);
        let mut worker = Worker { stdin, stdout, server, rests, lost: None, version: String::new() };
        worker.version = worker.answer()?.version;
        worker.rest()?;
        Ok(worker)
    }

    fn ask(&mut self, question: &Question<'_>) -> Result<Answer> {
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        let mut line = serde_json::to_string(question).during("a question")?;
        line.push('\n');
        if self.rests {
            self.server.signal(Signal::CONT)?;
        }
        let sent = self.stdin.write_all(line.as_bytes());
        let answer = sent.during("asking a worker").and_then(|()| self.answer());
        self.rest()?;
        match answer {
            Ok(Answer { error: Some(error), .. }) => Err(Failure(error)),
            answer => answer,
        }
    }

    fn rest(&self) -> Result<()> {
        if self.rests { self.server.signal(Signal::STOP) } else { Ok(()) }
    }

    fn answer(&mut self) -> Result<Answer> {
        let mut events = [PollFd::new(self.stdout.get_ref(), PollFlags::IN)];
        let mut line = String::new();
        let answer = match poll(&mut events, Some(&PATIENCE)).during("waiting for a worker")? {
            0 => Err(Failure(format!("no answer within {:?}", Duration::from_secs(PATIENCE.tv_sec as u64)))),
            _ => match self.stdout.read_line(&mut line).during("reading what a worker says")? {
                0 => Err(self.server.last_words()),
                _ => serde_json::from_str(&line).during(format_args!("a worker says {line:?}")),
            },
        };
        match &answer {
            Err(lost) => self.lost = Some(lost.clone()),
            Ok(Answer { error: Some(error), .. }) if self.version.is_empty() => {
                return Err(Failure(error.clone()));
            }
            Ok(_) => {}
        }
        answer
    }
}

/// One way of using a worker's store, as a peer.
#[derive(Debug)]
pub struct InWorker {
    /// The process, which several ways may share.
    pub worker: Rc<RefCell<Worker>>,
    /// Which way, in the worker's words.
    pub mode: &'static str,
    /// As [`Peer::name`].
    pub name: &'static str,
    /// As [`Peer::about`].
    pub about: &'static str,
    /// The operations that it has.
    pub ops: &'static [Op],
}

impl InWorker {
    fn ask(&self, act: &'static str, op: Op, shape: Shape, limits: Limits) -> Result<Answer> {
        let Limits { budget, least, most } = limits;
        let Shape { values, bytes } = shape;
        let budget_ms = budget.as_millis() as u64;
        let question =
            Question { act, mode: self.mode, op: op.label(), values, bytes, budget_ms, least, most };
        self.worker.borrow_mut().ask(&question)
    }
}

impl Peer for InWorker {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        self.ops.contains(&op)
    }

    fn check(&mut self, op: Op, job: &mut Job) -> Result<()> {
        let once = Limits { budget: Duration::ZERO, least: 1, most: 1 };
        self.ask("check", op, job.shape, once).map(drop)
    }

    fn burst(&mut self, op: Op, job: &mut Job, limits: Limits) -> Result<Vec<f64>> {
        let samples = self.ask("burst", op, job.shape, limits)?.us;
        if samples.len() < limits.least {
            return Err(Failure(format!("{} samples instead of {}", samples.len(), limits.least)));
        }
        Ok(samples)
    }
}
