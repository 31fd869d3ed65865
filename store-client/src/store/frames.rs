//! Which frames of an arena have memory, and which of them are in use.

use std::ops::Range;

/// Where a frame stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// No memory.
    Hole,
    /// Being populated or punched out by one thread; everybody else waits until it has settled.
    Busy,
    /// Has memory.
    Warm,
}

#[derive(Debug, Clone, Copy)]
struct Frame {
    /// Extents that touch it.
    users: u32,
    state: State,
}

/// The frames of one arena.
#[derive(Debug)]
pub(super) struct Frames {
    table: Vec<Frame>,
    warm: usize,
    /// Warm and without a user.
    spare: usize,
    /// In somebody's hand.
    busy: usize,
}

/// Consecutive frames.
pub(super) type Run = Range<usize>;

impl Frames {
    /// `count` frames, all holes.
    pub(super) fn new(count: usize) -> Self {
        Self { table: vec![Frame { users: 0, state: State::Hole }; count], warm: 0, spare: 0, busy: 0 }
    }

    /// Frames that have memory.
    pub(super) fn warm(&self) -> usize {
        self.warm
    }

    /// Whether no frame has memory, nor is about to have some.
    pub(super) fn are_holes(&self) -> bool {
        self.warm == 0 && self.busy == 0
    }

    /// Frames that have memory and no user.
    pub(super) fn spare(&self) -> usize {
        self.spare
    }

    /// Adds a user to each frame; from then on none of them is given away.
    pub(super) fn claim(&mut self, run: Run) {
        for frame in &mut self.table[run] {
            self.spare -= usize::from(frame.state == State::Warm && frame.users == 0);
            frame.users += 1;
        }
    }

    /// Takes a user from each frame.
    pub(super) fn release(&mut self, run: Run) {
        for frame in &mut self.table[run] {
            frame.users -= 1;
            self.spare += usize::from(frame.state == State::Warm && frame.users == 0);
        }
    }

    /// Whether each frame has memory.
    pub(super) fn all_warm(&self, run: Run) -> bool {
        self.table[run].iter().all(|frame| frame.state == State::Warm)
    }

    /// Marks the holes among these frames as busy and returns them.
    pub(super) fn take_holes(&mut self, run: Run) -> Vec<Run> {
        let mut holes = Vec::new();
        for at in run {
            if self.table[at].state == State::Hole {
                self.table[at].state = State::Busy;
                self.busy += 1;
                extend(&mut holes, at);
            }
        }
        holes
    }

    /// Marks up to `most` holes as busy, lowest first, where the next extents will lie, and returns them.
    pub(super) fn take_lowest_holes(&mut self, most: usize) -> Vec<Run> {
        let holes = (0..self.table.len()).filter(|&at| self.table[at].state == State::Hole);
        let end = holes.take(most).last().map_or(0, |last| last + 1);
        self.take_holes(0..end)
    }

    /// Marks up to `most` spare frames as busy, highest first, and returns them.
    pub(super) fn take_spare(&mut self, most: usize) -> Vec<Run> {
        let mut left = most.min(self.spare);
        self.spare -= left;
        self.warm -= left;
        self.busy += left;
        let mut taken = Vec::new();
        for at in (0..self.table.len()).rev() {
            if left == 0 {
                break;
            }
            let frame = &mut self.table[at];
            if frame.state == State::Warm && frame.users == 0 {
                frame.state = State::Busy;
                left -= 1;
                extend(&mut taken, at);
            }
        }
        taken
    }

    /// Ends the busy state of these runs.
    pub(super) fn settle(&mut self, runs: &[Run], state: State) {
        for run in runs {
            for frame in &mut self.table[run.clone()] {
                debug_assert_eq!(frame.state, State::Busy);
                frame.state = state;
                self.busy -= 1;
                self.warm += usize::from(state == State::Warm);
                self.spare += usize::from(state == State::Warm && frame.users == 0);
            }
        }
    }
}

/// Frames in `runs`.
pub(super) fn count(runs: &[Run]) -> usize {
    runs.iter().map(Range::len).sum()
}

/// Adds a frame that lies next to the last run, above or below, or starts a run.
fn extend(runs: &mut Vec<Run>, at: usize) {
    match runs.last_mut() {
        Some(run) if run.end == at => run.end += 1,
        Some(run) if run.start == at + 1 => run.start = at,
        _ => runs.push(at..at + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_warm_frames_without_a_user_are_spare() {
        let mut frames = Frames::new(8);
        let holes = frames.take_holes(0..6);
        assert_eq!(count(&holes), 6);
        assert!(!frames.all_warm(0..6));
        frames.settle(&holes, State::Warm);
        frames.claim(2..4);
        assert_eq!((frames.warm(), frames.spare()), (6, 4));
        assert_eq!(frames.take_spare(3), [4..6, 1..2]);
        assert_eq!((frames.warm(), frames.spare()), (3, 1));
        frames.settle(&[4..6, 1..2], State::Hole);
        frames.release(2..4);
        assert_eq!((frames.warm(), frames.spare()), (3, 3));
        assert_eq!(frames.take_lowest_holes(3), [1..2, 4..6]);
        assert_eq!(frames.take_holes(0..8).as_slice(), std::slice::from_ref(&(6..8)));
        frames.settle(&[1..2, 4..8], State::Hole);
        assert_eq!(frames.take_spare(8), [2..4, 0..1]);
        assert!(!frames.are_holes(), "what is in somebody's hand may come back");
        frames.settle(&[2..4, 0..1], State::Hole);
        assert!(frames.are_holes());
    }
}
