-- A server says hello. ARGV: server, incarnation. Returns how many tickets an earlier process of that name had held:
-- they are issued again.
local tickets = 0
if redis.call('HGET', key('incarnations'), ARGV[1]) ~= ARGV[2] then
  tickets = take_back(ARGV[1], 'server ' .. ARGV[1] .. ' restarted')
end
redis.call('HSET', key('incarnations'), ARGV[1], ARGV[2])
redis.call('ZADD', key('heard'), now(), ARGV[1])
return tickets
