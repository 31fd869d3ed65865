//! Calls that fail or hang because a test says so.

use hal::Deadline;
use parking_lot::{Condvar, Mutex};

use super::log::Op;

/// A machine's fault plan. Calls are counted from when a fault is planned: the first call after that is number 1.
#[derive(Debug, Default)]
pub struct Faults {
    plan: Mutex<Plan>,
    unblocked: Condvar,
}

#[derive(Debug, Default)]
struct Plan {
    rules: Vec<Rule>,
    /// Grows with each `unblock_all`; a hanging call waits for that.
    epoch: u64,
    /// The machine's owner is gone: nothing hangs any more.
    over: bool,
}

#[derive(Debug)]
struct Rule {
    op: Op,
    /// Calls until it applies.
    left: u64,
    always: bool,
    action: Action,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Fail(i64),
    Hang,
}

/// What the plan has for a call.
pub(super) enum Fate {
    Go,
    Fail(i64),
    /// It hung, and its deadline passed.
    Late,
}

impl Faults {
    /// The `nth` call of `op` from now fails with this vendor code, and does nothing.
    pub fn fail(&self, op: Op, nth: u64, code: i64) {
        self.plan(op, nth, false, Action::Fail(code));
    }

    /// Every call of `op` from the `nth` on fails with this vendor code.
    pub fn fail_from(&self, op: Op, nth: u64, code: i64) {
        self.plan(op, nth, true, Action::Fail(code));
    }

    /// The `nth` call of `op` from now does not return until [`unblock_all`](Faults::unblock_all), then goes on as if
    /// it had only been slow. A call that takes a deadline gives up when it passes.
    pub fn hang(&self, op: Op, nth: u64) {
        self.plan(op, nth, false, Action::Hang);
    }

    /// Every call of `op` from the `nth` on hangs, as in [`hang`](Faults::hang).
    pub fn hang_from(&self, op: Op, nth: u64) {
        self.plan(op, nth, true, Action::Hang);
    }

    /// Lets every call that hangs now go on.
    pub fn unblock_all(&self) {
        self.plan.lock().epoch += 1;
        self.unblocked.notify_all();
    }

    /// Forgets what is planned. Calls that hang go on hanging.
    pub fn clear(&self) {
        self.plan.lock().rules.clear();
    }

    pub(super) fn end(&self) {
        let mut plan = self.plan.lock();
        plan.over = true;
        plan.epoch += 1;
        self.unblocked.notify_all();
    }

    /// Waits out what is planned for this call of `op`.
    pub(super) fn meet(&self, op: Op, deadline: Deadline) -> Fate {
        let mut plan = self.plan.lock();
        let mut action = None;
        plan.rules.retain_mut(|rule| {
            if rule.op != op {
                return true;
            }
            rule.left = rule.left.saturating_sub(1);
            if rule.left > 0 {
                return true;
            }
            action.get_or_insert(rule.action);
            rule.always
        });
        match action {
            None => Fate::Go,
            Some(Action::Fail(code)) => Fate::Fail(code),
            Some(Action::Hang) => {
                let epoch = plan.epoch;
                while plan.epoch == epoch && !plan.over {
                    match deadline.instant() {
                        None => self.unblocked.wait(&mut plan),
                        Some(at) => {
                            if self.unblocked.wait_until(&mut plan, at).timed_out() {
                                return Fate::Late;
                            }
                        }
                    }
                }
                Fate::Go
            }
        }
    }

    fn plan(&self, op: Op, nth: u64, always: bool, action: Action) {
        self.plan.lock().rules.push(Rule { op, left: nth.max(1), always, action });
    }
}
