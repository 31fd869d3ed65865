//! cudarc's types, with cudarc's own driver layer on the same simulated driver.

use backend_cuda::CudaStream;
use cudarc::driver::CudaContext;
use hal::{Deadline, Device, Kind};

use crate::common::{alone, device, patient, read};

#[test]
fn a_slice_is_a_region_with_its_stream() {
    alone(|sim| {
        let device = device(0);
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let slice = stream.clone_htod(&[1u32, 2, 3]).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: the slice is kept to the end.
        let (region, named) = unsafe { device.of_slice(&slice) }.unwrap();
        assert_eq!(region.len, 12);
        // SAFETY: as above.
        assert_eq!(named, unsafe { CudaStream::from_cudarc(&stream) });
        let bound = device.bind_current().unwrap();
        assert_eq!(bound.locate(region.addr, region.len).unwrap().region, region);
        sim.hold(named.raw() as u64).unwrap();
        sim.fill(named.raw() as u64, region.addr as u64, 12, 9).unwrap();
        assert_eq!(bound.sync_stream(named, Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
        sim.release(named.raw() as u64).unwrap();
        bound.sync_stream(named, patient()).unwrap();
        assert_eq!(read(&bound, region), [9; 12]);
        assert_eq!(sim.retained(0), Ok(2), "cudarc's and ours are one context");
    });
}

#[test]
fn a_slice_of_another_device_is_refused() {
    alone(|_| {
        let (mine, context) = (device(0), CudaContext::new(1).unwrap());
        let slice = context.default_stream().alloc_zeros::<u8>(16).unwrap();
        // SAFETY: the slice is kept to the end.
        assert_eq!(unsafe { mine.of_slice(&slice) }.unwrap_err().kind(), Kind::DeviceMismatch);
    });
}
