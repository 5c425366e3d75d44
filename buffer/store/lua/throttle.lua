-- Training can't bear the configured staleness at present, or can again. ARGV: the bound that issue.lua keeps to where it
-- is the smaller one. What is in flight or ready stays: lease.lua judges it by the configured bound.
redis.call('HSET', key('meta'), 'throttle', tonumber(ARGV[1]))
