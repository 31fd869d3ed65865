//! The rounds: every peer's calls in turns.

use std::time::{Duration, Instant};

use crate::{
    failure::{Failure, Result},
    job::{Job, Op, Shape},
    store::{Limits, Peer},
};

/// What is measured, and how long.
#[derive(Debug, Clone)]
pub struct Plan {
    /// In this order.
    pub shapes: Vec<Shape>,
    /// Rounds for each shape; in each, every peer has one burst of every operation.
    pub rounds: usize,
    /// Of one burst.
    pub limits: Limits,
    /// When this is used up there are fewer rounds, but always one.
    pub time: Duration,
}

/// Samples of one peer, operation and shape.
#[derive(Debug, Clone)]
pub struct Cell {
    /// By name.
    pub peer: &'static str,
    /// Which call.
    pub op: Op,
    /// Of how much.
    pub shape: Shape,
    /// µs of each call, by round.
    pub rounds: Vec<Vec<f64>>,
    /// Why there are none, or no more.
    pub failed: Option<Failure>,
}

/// Makes all rounds. `tell` hears of each shape and round, and may end the run with an error.
pub fn run(
    peers: &mut [Box<dyn Peer>],
    plan: &Plan,
    mut tell: impl FnMut(Shape, usize) -> Result<()>,
) -> Result<Vec<Cell>> {
    let most = plan.shapes.iter().map(|shape| shape.total()).max().unwrap_or(0);
    let mut job = Job::new(most);
    let mut cells = Vec::new();
    let start = Instant::now();
    for (done, &shape) in plan.shapes.iter().enumerate() {
        tell(shape, 0)?;
        job.turn_to(shape);
        let mut of_shape = checked(peers, shape, &mut job, &mut || tell(shape, 0))?;
        let share = plan.time.mul_f64((done + 1) as f64 / plan.shapes.len() as f64);
        for round in 0..plan.rounds {
            if round > 0 && start.elapsed() > share {
                break;
            }
            for op in Op::ALL {
                let turn = of_shape.iter_mut().filter(|(_, cell)| cell.op == op).collect::<Vec<_>>();
                // Each round begins with another peer, so that nobody always comes after the same one.
                let (first, count) = (round % turn.len().max(1), turn.len());
                let mut turn: Vec<_> = turn.into_iter().map(Some).collect();
                for n in 0..count {
                    tell(shape, round + 1)?;
                    let Some((peer, cell)) = turn[(first + n) % count].take() else { continue };
                    if cell.failed.is_some() {
                        continue;
                    }
                    match peers[*peer].burst(op, &mut job, plan.limits) {
                        Ok(samples) => cell.rounds.push(samples),
                        Err(e) => cell.failed = Some(e),
                    }
                }
            }
        }
        cells.extend(of_shape.into_iter().map(|(_, cell)| cell));
    }
    Ok(cells)
}

/// A cell for each peer and operation; failed ones where the bytes that come back are not right.
fn checked(
    peers: &mut [Box<dyn Peer>],
    shape: Shape,
    job: &mut Job,
    tell: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<(usize, Cell)>> {
    let mut cells = Vec::new();
    for (n, peer) in peers.iter_mut().enumerate() {
        for op in Op::ALL.into_iter().filter(|&op| peer.offers(op, shape)).collect::<Vec<_>>() {
            tell()?;
            let failed = peer.check(op, job).err();
            cells.push((n, Cell { peer: peer.name(), op, shape, rounds: Vec::new(), failed }));
        }
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use super::*;

    struct Scripted {
        name: &'static str,
        sound: bool,
        calls: Rc<RefCell<Vec<&'static str>>>,
    }

    impl Peer for Scripted {
        fn name(&self) -> &'static str {
            self.name
        }

        fn about(&self) -> &'static str {
            ""
        }

        fn offers(&self, op: Op, _: Shape) -> bool {
            op == Op::Put
        }

        fn check(&mut self, _: Op, _: &mut Job) -> Result<()> {
            if self.sound { Ok(()) } else { Err(Failure("wrong bytes".into())) }
        }

        fn burst(&mut self, _: Op, _: &mut Job, _: Limits) -> Result<Vec<f64>> {
            self.calls.borrow_mut().push(self.name);
            Ok(vec![1.0])
        }
    }

    fn plan() -> Plan {
        let limits = Limits { budget: Duration::ZERO, least: 1, most: 1 };
        Plan { shapes: vec![Shape::one(1)], rounds: 2, limits, time: Duration::from_secs(60) }
    }

    #[test]
    fn peers_take_turns_and_each_round_begins_with_another() {
        let calls = Rc::default();
        let peer =
            |name, sound| -> Box<dyn Peer> { Box::new(Scripted { name, sound, calls: Rc::clone(&calls) }) };
        let mut peers = [peer("a", true), peer("cheat", false), peer("b", true)];
        let cells = run(&mut peers, &plan(), |_, _| Ok(())).unwrap();
        assert_eq!(*calls.borrow(), ["a", "b", "b", "a"]);
        assert_eq!(cells.iter().map(|cell| cell.rounds.len()).collect::<Vec<_>>(), [2, 0, 2]);
        assert_eq!(cells[1].failed, Some(Failure("wrong bytes".into())));
    }

    #[test]
    fn an_interrupt_ends_the_run() {
        let calls = Rc::default();
        let mut peers: [Box<dyn Peer>; 1] =
            [Box::new(Scripted { name: "a", sound: true, calls: Rc::clone(&calls) })];
        let interrupted = Failure("interrupted".into());
        let stop = |_, round| if round == 2 { Err(interrupted.clone()) } else { Ok(()) };
        assert_eq!(run(&mut peers, &plan(), stop).map(|_| ()), Err(interrupted.clone()));
        assert_eq!(calls.borrow().len(), 1);
    }
}
