import bench_few as b
import r3

js = [j for j in r3.jobs if j[0] in ("q8_0", "w8a16")]
print(len(r3.jobs), js)
it = b.compile_jobs(js[:3])
try:
    b.finish(it, True)
except Exception as e:
    print("expected:", repr(e)[:100])
