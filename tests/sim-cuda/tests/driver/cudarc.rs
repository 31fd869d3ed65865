//! cudarc's safe layer on the simulated driver, which it finds by its bare name.

use std::thread;

use cudarc::driver::{CudaContext, DevicePtr, sys};

driver_tests! {
    fn the_safe_layer_runs[](d) {
        // The driver is loaded already; its name leads cudarc to the same one.
        // SAFETY: only asks.
        assert!(unsafe { sys::is_culib_present() });
        let context = CudaContext::new(1).unwrap();
        assert!(context.name().unwrap().contains("simulated"));
        let stream = context.new_stream().unwrap();
        let numbers: Vec<f32> = (0..1000u16).map(f32::from).collect();
        let there = stream.clone_htod(&numbers).unwrap();
        let mut copy = stream.alloc_zeros::<f32>(1000).unwrap();
        stream.memcpy_dtod(&there, &mut copy).unwrap();
        assert_eq!(stream.clone_dtoh(&copy).unwrap(), numbers);

        let (address, _guard) = copy.device_ptr(&stream);
        // The safe layer takes it from the pool, where there is one.
        assert_eq!(d.attributes([9, 10, 12], address), Ok([1, 0, 4000]));
        let raw = stream.cu_stream() as u64;
        d.control.hold(raw).unwrap();
        d.control.fill(raw, address, 4000, 0).unwrap();
        let event = stream.record_event(None).unwrap();
        assert!(!event.is_complete());
        thread::scope(|s| {
            let waiter = s.spawn(|| stream.synchronize().unwrap());
            d.control.wait_for_calls("cuStreamSynchronize", 1);
            d.control.release(raw).unwrap();
            waiter.join().unwrap();
        });
        assert!(event.is_complete());
        for default in [context.default_stream(), context.per_thread_stream()] {
            default.synchronize().unwrap();
        }
        context.synchronize().unwrap();
        assert_eq!(d.control.count("cuDevicePrimaryCtxRetain"), 1);
    }
}
