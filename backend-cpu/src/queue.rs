//! A stream's queue: work runs in order on the queue's own thread, and a test may hold it.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, ThreadId},
};

use hal::Deadline;
use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// A queue with a thread behind it. Dropping it lets the thread finish what is queued and end, without waiting for it;
/// held work is discarded.
#[derive(Debug)]
pub(crate) struct Queue {
    shared: Arc<Shared>,
    thread: ThreadId,
}

/// A place in a queue: reached when everything queued before it has run.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    shared: Arc<Shared>,
    at: u64,
}

/// Why waiting did not succeed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotDone {
    /// The deadline passed; this many items are not done.
    Timeout(u64),
    /// Work failed since the last time somebody asked.
    Failed(String),
    /// The queue's own thread would wait for itself.
    OwnThread,
    /// What was waited for was dropped.
    Aborted,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// There may be something to run.
    work: Condvar,
    /// Something has run.
    progress: Condvar,
}

struct State {
    jobs: VecDeque<Job>,
    queued: u64,
    done: u64,
    /// How many more items may run; `u64::MAX` when the queue is not held.
    allowance: u64,
    closed: bool,
    /// How often the queue was aborted.
    aborts: u64,
    /// The first failure that nobody has been told of.
    failure: Option<String>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("queued", &self.queued)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl Queue {
    /// A queue whose thread has this name.
    pub(crate) fn start(name: String) -> io::Result<Self> {
        let state = State {
            jobs: VecDeque::new(),
            queued: 0,
            done: 0,
            allowance: u64::MAX,
            closed: false,
            aborts: 0,
            failure: None,
        };
        let shared =
            Arc::new(Shared { state: Mutex::new(state), work: Condvar::new(), progress: Condvar::new() });
        let on_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name).spawn(move || on_thread.run())?.thread().id();
        Ok(Queue { shared, thread })
    }

    /// Queues `work`; on a closed queue it is discarded.
    pub(crate) fn push(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        if state.closed {
            return;
        }
        state.jobs.push_back(Box::new(work));
        state.queued += 1;
        self.shared.work.notify_one();
    }

    /// The place after everything queued so far.
    pub(crate) fn mark(&self) -> Mark {
        Mark { shared: Arc::clone(&self.shared), at: self.shared.state.lock().queued }
    }

    /// Lets nothing more run. What is running now goes on.
    #[cfg(feature = "strict")]
    pub(crate) fn hold(&self) {
        self.shared.state.lock().allowance = 0;
    }

    /// Lets this many more items run, `u64::MAX` for no hold any longer.
    #[cfg(feature = "strict")]
    pub(crate) fn allow(&self, items: u64) {
        let mut state = self.shared.state.lock();
        state.allowance = state.allowance.saturating_add(items);
        self.shared.work.notify_one();
    }

    /// Drops what has not begun. Who waits for any of it is told.
    #[cfg(feature = "strict")]
    pub(crate) fn abort(&self) {
        let mut state = self.shared.state.lock();
        state.done += state.jobs.len() as u64;
        state.jobs.clear();
        state.aborts += 1;
        self.shared.progress.notify_all();
    }

    /// What dropping does, for a queue that somebody may still be waiting for.
    pub(crate) fn close(&self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_one();
    }

    /// How many items have not run.
    #[cfg(feature = "strict")]
    pub(crate) fn pending(&self) -> u64 {
        let state = self.shared.state.lock();
        state.queued - state.done
    }

    /// Waits for what is queued so far and tells of a failure since the last time.
    pub(crate) fn wait(&self, deadline: Deadline) -> Result<(), NotDone> {
        if thread::current().id() == self.thread {
            return Err(NotDone::OwnThread);
        }
        self.mark().wait(deadline)?;
        match self.shared.state.lock().failure.take() {
            Some(failure) => Err(NotDone::Failed(failure)),
            None => Ok(()),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl Mark {
    /// Whether the place is reached. Never blocks.
    pub(crate) fn is_reached(&self) -> bool {
        self.shared.state.lock().done >= self.at
    }

    /// Waits until it is reached.
    pub(crate) fn wait(&self, deadline: Deadline) -> Result<(), NotDone> {
        let mut state = self.shared.state.lock();
        let aborts = state.aborts;
        while state.done < self.at || state.aborts != aborts {
            if state.aborts != aborts {
                return Err(NotDone::Aborted);
            }
            let late = match deadline.instant() {
                Some(at) => self.shared.progress.wait_until(&mut state, at).timed_out(),
                None => {
                    self.shared.progress.wait(&mut state);
                    false
                }
            };
            if late && state.done < self.at {
                return Err(NotDone::Timeout(self.at - state.done));
            }
        }
        Ok(())
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if state.closed && state.allowance < u64::MAX {
                state.jobs.clear();
                state.done = state.queued;
                self.progress.notify_all();
            }
            let job = if state.allowance > 0 { state.jobs.pop_front() } else { None };
            let Some(job) = job else {
                if state.closed {
                    return;
                }
                self.work.wait(&mut state);
                continue;
            };
            if state.allowance < u64::MAX {
                state.allowance -= 1;
            }
            drop(state);
            let outcome = catch_unwind(AssertUnwindSafe(job));
            state = self.state.lock();
            if let Err(panic) = outcome {
                state.failure.get_or_insert_with(|| text(&*panic));
            }
            state.done += 1;
            self.progress.notify_all();
        }
    }
}

fn text(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    format!("queued work panicked: {}", said.unwrap_or("no message"))
}
