//! Calls that fail or hang because a test says so, by the exported function's name, separated by commas:
//! `cuMemAlloc_v2:3=2` is the third call from when it was planned, `cuMemAlloc_v2:3+=2` every call from the third on,
//! `cuMemAlloc_v2=2` every call. With `hang` in place of a status the call does not return until it is let go, and then
//! does what it should. With 0 it succeeds and does nothing.

use std::{path::PathBuf, time::Duration};

use parking_lot::{Condvar, Mutex};

/// How often a hanging call looks for the file that lets it go.
const LOOK: Duration = Duration::from_millis(10);

/// The plan, and the calls that hang by it.
#[derive(Debug, Default)]
pub struct Faults {
    plan: Mutex<Plan>,
    unblocked: Condvar,
    unblock_file: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct Plan {
    rules: Vec<Rule>,
    /// Grows with each `unblock`; a hanging call waits for that.
    epoch: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Rule {
    function: String,
    /// Calls until it applies, counted from when it was planned.
    left: u64,
    always: bool,
    action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Answer(i32),
    Hang,
}

/// What the plan has for a call.
pub enum Fate {
    /// Do what it should.
    Go,
    /// Answer with this and do nothing.
    Answer(i32),
}

impl Faults {
    /// No faults. Calls that hang go on once this file exists.
    pub fn new(unblock_file: Option<PathBuf>) -> Self {
        Faults { unblock_file, ..Faults::default() }
    }

    /// Adds what `plan` says in the form of `HAULIER_SIM_FAULTS`.
    ///
    /// # Errors
    /// What is wrong with it. A plan with a mistake adds nothing.
    pub fn add(&self, plan: &str) -> Result<(), String> {
        let rules = parse(plan)?;
        self.plan.lock().rules.extend(rules);
        Ok(())
    }

    /// Forgets what is planned. Calls that hang go on hanging.
    pub fn clear(&self) {
        self.plan.lock().rules.clear();
    }

    /// Lets every call that hangs now go on.
    pub fn unblock(&self) {
        self.plan.lock().epoch += 1;
        self.unblocked.notify_all();
    }

    /// Waits out what is planned for this call of `function`; `hanging` is told before it waits.
    pub fn meet(&self, function: &str, hanging: impl FnOnce()) -> Fate {
        let mut plan = self.plan.lock();
        let mut action = None;
        plan.rules.retain_mut(|rule| {
            if rule.function != function {
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
            Some(Action::Answer(code)) => Fate::Answer(code),
            Some(Action::Hang) => {
                hanging();
                let epoch = plan.epoch;
                while plan.epoch == epoch && !self.unblock_file.as_ref().is_some_and(|file| file.exists()) {
                    self.unblocked.wait_for(&mut plan, LOOK);
                }
                Fate::Go
            }
        }
    }
}

fn parse(plan: &str) -> Result<Vec<Rule>, String> {
    plan.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(rule).collect()
}

fn rule(text: &str) -> Result<Rule, String> {
    let wrong = || format!("{text}: neither FUNCTION=STATUS nor FUNCTION:N=STATUS nor FUNCTION:N+=STATUS");
    let (calls, action) = text.split_once('=').ok_or_else(wrong)?;
    let action = match action {
        "hang" => Action::Hang,
        number => Action::Answer(number.parse().map_err(|_| wrong())?),
    };
    let (function, which) = calls.split_once(':').unwrap_or((calls, "1+"));
    let (nth, always) = which.strip_suffix('+').map_or((which, false), |nth| (nth, true));
    let left = nth.parse().ok().filter(|&nth| nth > 0).ok_or_else(wrong)?;
    Ok(Rule { function: function.into(), left, always, action })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read() {
        let rule =
            |function: &str, left, always, action| Rule { function: function.into(), left, always, action };
        assert_eq!(
            parse("cuInit=100, cuMemAlloc_v2:2=2,cuStreamQuery:3+=hang"),
            Ok(vec![
                rule("cuInit", 1, true, Action::Answer(100)),
                rule("cuMemAlloc_v2", 2, false, Action::Answer(2)),
                rule("cuStreamQuery", 3, true, Action::Hang),
            ])
        );
        assert_eq!(parse(""), Ok(vec![]));
        for wrong in ["cuInit", "cuInit:0=1", "cuInit:x=1", "cuInit=no"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
