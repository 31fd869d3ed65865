//! Stream capture, and how easily it is spoiled.

use std::thread::{self, ThreadId};

use super::{
    log::{Argument, Op},
    machine::Machine,
    refusal::{Answer, Why},
    stream::Key,
};

/// How far a capture's prohibitions reach; also what a thread asks to be protected from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CaptureMode {
    /// Forbidden calls on any thread spoil the capture.
    #[default]
    Global,
    /// Forbidden calls on the capturing thread do.
    ThreadLocal,
    /// None does.
    Relaxed,
}

/// A stream's state as to capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CaptureStatus {
    /// Not captured.
    #[default]
    None,
    /// Captured.
    Active,
    /// Captured, but the capture is spoiled; it has to be ended and gives nothing.
    Invalidated,
}

/// One stream's capture.
#[derive(Debug, Default)]
pub(super) struct Capture {
    pub(super) status: CaptureStatus,
    mode: CaptureMode,
    by: Option<ThreadId>,
    /// The stream on which it began, where this one was drawn in by an event.
    origin: Option<Key>,
    /// Work that was queued meanwhile. It is recorded, not run.
    pub(super) items: usize,
}

impl Capture {
    /// The part that a stream takes in a capture when it waits for an event that was recorded within it.
    pub(super) fn joined(&self, recorded_on: Key) -> Capture {
        let origin = Some(self.origin.unwrap_or(recorded_on));
        Capture { status: CaptureStatus::Active, mode: self.mode, by: self.by, origin, items: 0 }
    }

    /// For a call that a capture forbids: the reason to refuse it, if there is a capture, which is spoiled now.
    pub(super) fn spoil(&mut self) -> Option<Why> {
        match self.status {
            CaptureStatus::None => None,
            CaptureStatus::Active => {
                self.status = CaptureStatus::Invalidated;
                Some(Why::CaptureForbids)
            }
            CaptureStatus::Invalidated => Some(Why::CaptureSpoiled),
        }
    }
}

impl Machine {
    /// A call: work queued on `stream` from now on is recorded instead of run.
    pub fn begin_capture(&self, stream: u64, mode: CaptureMode) -> Answer<()> {
        self.call(Op::BeginCapture, Argument::Stream(stream), || {
            let on = self.stream(stream)?;
            // CUDA captures per-thread streams, but not the one that orders with others by itself.
            if on.is_default() && !(self.0.spec.legacy_order && on.is_blocking()) {
                return Err(self.refuse(Why::CaptureForbids, "a default stream cannot be captured"));
            }
            let mut capture = on.capture.lock();
            if capture.status != CaptureStatus::None {
                return Err(self.refuse(Why::InvalidValue, "the stream is captured already"));
            }
            *capture = Capture {
                status: CaptureStatus::Active,
                mode,
                by: Some(thread::current().id()),
                origin: None,
                items: 0,
            };
            Ok(())
        })
    }

    /// A call: ends the capture and answers with the number of recorded items. A spoiled capture is refused, once.
    pub fn end_capture(&self, stream: u64) -> Answer<usize> {
        self.call(Op::EndCapture, Argument::Stream(stream), || {
            let on = self.stream(stream)?;
            {
                let capture = on.capture.lock();
                if capture.origin.is_some() {
                    return Err(self.refuse(Why::NotCapturing, "the capture began on another stream"));
                }
                let foreign = capture.by != Some(thread::current().id());
                if capture.status != CaptureStatus::None && capture.mode != CaptureMode::Relaxed && foreign {
                    return Err(self.refuse(Why::CaptureWrongThread, "another thread began the capture"));
                }
            }
            let mut capture = std::mem::take(&mut *on.capture.lock());
            for joined in self.0.streams.lock().all() {
                let mut part = joined.capture.lock();
                if part.origin == Some(on.key()) {
                    let part = std::mem::take(&mut *part);
                    capture.items += part.items;
                    if part.status == CaptureStatus::Invalidated {
                        capture.status = CaptureStatus::Invalidated;
                    }
                }
            }
            match capture.status {
                CaptureStatus::Active => Ok(capture.items),
                CaptureStatus::None => Err(self.refuse(Why::NotCapturing, "the stream is not captured")),
                CaptureStatus::Invalidated => {
                    Err(self.refuse(Why::CaptureSpoiled, "a forbidden call spoiled the capture"))
                }
            }
        })
    }

    /// A call: whether `stream` is captured. The one question that spoils nothing.
    pub fn capture_status(&self, stream: u64) -> Answer<CaptureStatus> {
        self.call(Op::CaptureStatus, Argument::Stream(stream), || {
            let found = self.find(stream)?;
            self.implicit_capture(&found, false)?;
            let on = found.stream;
            Ok(on.map_or(CaptureStatus::None, |on| on.capture.lock().status))
        })
    }

    /// A call: sets which captures forbid the calling thread something, and answers with the mode before. With
    /// [`CaptureMode::Relaxed`] the thread may allocate and register whatever is captured elsewhere.
    pub fn exchange_capture_mode(&self, mode: CaptureMode) -> Answer<CaptureMode> {
        self.call(Op::ExchangeCaptureMode, Argument::None, || Ok(self.replace_capture_mode(mode)))
    }

    /// For an ABI in front of the machine, in calls that the machine itself takes for harmless: refuses what captures
    /// forbid, and spoils every capture that forbids it. No call.
    pub fn forbidden_beside_captures(&self) -> Answer<()> {
        self.beside_captures()
    }

    /// For a call that captures forbid: refuses, and spoils every capture that forbids it.
    pub(super) fn beside_captures(&self) -> Answer<()> {
        let mode = self.capture_mode();
        if mode == CaptureMode::Relaxed {
            return Ok(());
        }
        let me = Some(thread::current().id());
        let mut forbidden = None;
        for stream in self.0.streams.lock().all() {
            let mut capture = stream.capture.lock();
            let reaches = if capture.by == me {
                capture.mode != CaptureMode::Relaxed
            } else {
                capture.mode == CaptureMode::Global && mode == CaptureMode::Global
            };
            if reaches {
                forbidden = forbidden.or(capture.spoil());
            }
        }
        match forbidden {
            Some(why) => Err(self.refuse(why, "a stream is being captured")),
            None => Ok(()),
        }
    }
}
