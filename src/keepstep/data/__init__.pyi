from keepstep.library.data_stream import open_stream

open = open_stream  # noqa: A001
