import sys
from pathlib import Path

# manifests.py and its kin are helpers of this folder only.
sys.path.insert(0, str(Path(__file__).parent))
