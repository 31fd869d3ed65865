//! What the conformance suite needs of a backend besides its [`Device`].

use hal::{Device, DeviceUuid, NotExportable, Region};

/// Something that not every backend can give. What a backend lacks it says with a reason in [`Fixture::lacks`]; the
/// cases that need it are then ignored, by that reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Need {
    /// A second device beside the one under test.
    SecondDevice,
    /// A driver that keeps a current device for each thread, and can be asked for it.
    CurrentDevice,
    /// A thread that had no current device can be given back as it was.
    Unbind,
    /// A thread that had no current device can *not* be given back as it was.
    OneWay,
    /// The driver's switches from device to device can be counted.
    Switches,
    /// The driver can be made to refuse a call.
    Faults,
    /// Work can be queued that fails when it runs, and only its stream is the worse for it.
    QueuedFailure,
    /// A stream handle that means another stream on each thread.
    PerThreadStream,
    /// Streams can be captured.
    Capture,
    /// A freed address comes back for the next allocation of that size.
    AddressReuse,
    /// Memory of the device that has no handle.
    Unshareable,
    /// The driver says of memory that it did not allocate that it is the host's.
    ForeignPointers,
    /// The driver registers host memory.
    RegisterHost,
    /// The driver limits the size of a registration.
    RegisterLimit,
    /// The driver registers aligned addresses only.
    RegisterAlignment,
    /// A device whose capabilities are all clear.
    NoCaps,
}

/// A call into the driver that a test makes fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refuse {
    /// Making the device current.
    Bind,
    /// Allocating.
    Allocate,
    /// Registering with the driver, which happens once for each part.
    Pin,
}

/// A backend under test: one device, and the means to put it into the situations that the contract speaks of.
///
/// Each trial has a fixture of its own. A method that belongs to a [`Need`] is called only where the backend does not
/// lack it; its default panics, so that forgetting it is noticed.
pub trait Fixture<D: Device>: Sync {
    /// The device under test.
    fn device(&self) -> &D;

    /// What this backend cannot give, and why.
    fn lacks(&self) -> &'static [(Need, &'static str)];

    /// Called first on each thread that a case binds the device on and gives back: makes it like a thread of an
    /// application. Where a thread cannot lose its device again, it gets one here.
    fn enter(&self) {}

    /// A size that the device can never allocate.
    fn too_much(&self) -> usize;

    /// A new stream. It lives as long as the fixture.
    fn stream(&self) -> D::Stream;

    /// Lets nothing that is queued on `stream` from now on run, until [`release`](Fixture::release).
    fn hold(&self, stream: D::Stream);

    /// Ends [`hold`](Fixture::hold).
    fn release(&self, stream: D::Stream);

    /// Queues work that sets every byte of `region` to `byte`.
    fn queue_fill(&self, stream: D::Stream, region: Region, byte: u8);

    /// Queues work that fails when it runs.
    fn queue_failure(&self, stream: D::Stream) {
        let _ = stream;
        forgotten(Need::QueuedFailure)
    }

    /// How many regions are registered, counted in the driver's registrations where there is a driver.
    fn registered(&self) -> usize;

    /// See [`Need::SecondDevice`].
    fn second(&self) -> D {
        forgotten(Need::SecondDevice)
    }

    /// What the driver says is current on the calling thread.
    fn current(&self) -> Option<DeviceUuid> {
        forgotten(Need::CurrentDevice)
    }

    /// How often the driver was told to make another device current, or none, until now.
    fn switches(&self) -> u64 {
        forgotten(Need::Switches)
    }

    /// Makes the `nth` such call from now fail with this vendor code.
    fn refuse(&self, call: Refuse, nth: u64, code: i64) {
        let _ = (call, nth, code);
        forgotten(Need::Faults)
    }

    /// The handle that means another stream on each thread.
    fn per_thread_stream(&self) -> D::Stream {
        forgotten(Need::PerThreadStream)
    }

    /// Begins to capture `stream`.
    fn begin_capture(&self, stream: D::Stream) {
        let _ = stream;
        forgotten(Need::Capture)
    }

    /// Ends the capture; whether it was still valid.
    fn end_capture(&self, stream: D::Stream) -> bool {
        let _ = stream;
        forgotten(Need::Capture)
    }

    /// Regions of the device that cannot be exported, each with the reason to expect. They live as long as the fixture.
    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        forgotten(Need::Unshareable)
    }

    /// The most bytes of one registration with the driver.
    fn register_limit(&self) -> usize {
        forgotten(Need::RegisterLimit)
    }

    /// What a registered address must be a multiple of.
    fn register_alignment(&self) -> usize {
        forgotten(Need::RegisterAlignment)
    }

    /// See [`Need::NoCaps`].
    fn without_caps(&self) -> D {
        forgotten(Need::NoCaps)
    }
}

fn forgotten<R>(need: Need) -> R {
    panic!("the fixture neither lists {need:?} as lacking nor implements it")
}
