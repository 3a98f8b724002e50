import subprocess
import sys

from everybyte.host import peak_resident_bytes

MB = 10**6


def test_the_peak_grows_with_what_is_touched_and_stays_when_it_is_given_back():
    before = peak_resident_bytes()
    touched = bytearray(b"\1") * (before + 200 * MB)
    del touched
    assert peak_resident_bytes() > before + 190 * MB


def test_a_process_does_not_inherit_the_peak_of_the_one_that_started_it():
    touched = bytearray(b"\1") * (400 * MB)
    say = "from everybyte.host import peak_resident_bytes; print(peak_resident_bytes())"
    # numpy, pandas and torch are imported with the package and stay below 400 MB less what the test itself needs
    own = int(subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True).stdout)
    assert own < len(touched) < peak_resident_bytes()
