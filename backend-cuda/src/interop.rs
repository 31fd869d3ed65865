//! Regions and streams from cudarc's types.

use cudarc::driver::{self, CudaSlice, DevicePtr};
use hal::{Identity, Kind, Region, Result};

use crate::{CudaDevice, CudaStream};

impl CudaStream {
    /// The stream of one of cudarc's.
    ///
    /// # Safety
    /// `stream` must outlive the last call that the result is passed to.
    pub unsafe fn from_cudarc(stream: &driver::CudaStream) -> Self {
        // SAFETY: the handle is live, and the caller promises that it stays so.
        unsafe { CudaStream::from_raw(stream.cu_stream().expose_provenance()) }
    }
}

impl CudaDevice {
    /// A slice's memory, and the stream that its next work would be queued on, for
    /// [`with_stream`](hal::DeviceExt::with_stream).
    ///
    /// Where cudarc tracks events, the stream is made to wait for what other streams still write to the slice.
    ///
    /// *Errors*: [`Kind::DeviceMismatch`] for a slice of another device.
    ///
    /// # Safety
    /// The slice, and with it its stream, must outlive the last call that the result is passed to.
    pub unsafe fn of_slice<T>(&self, slice: &CudaSlice<T>) -> Result<(Region, CudaStream)> {
        let Identity { logical, .. } = hal::Device::identity(self);
        if slice.ordinal() != logical.0 as usize {
            return Err(self
                .plain(Kind::DeviceMismatch, "of_slice")
                .detail(format!("the slice is on device {} of this process", slice.ordinal())));
        }
        let (pointer, _read) = slice.device_ptr(slice.stream());
        // SAFETY: the slice keeps its stream, and the caller promises to keep the slice.
        let stream = unsafe { CudaStream::from_cudarc(slice.stream()) };
        Ok((self.region(pointer as usize, slice.num_bytes()), stream))
    }
}
