-- A server says goodbye. ARGV: server, incarnation; of an earlier one, late, it means nothing. Returns how many tickets and
-- slices of an evaluation it had held: they come back at once.
if redis.call('HGET', key('incarnations'), ARGV[1]) ~= ARGV[2] then return 0 end
local tickets, slices = dismiss(ARGV[1], 'server ' .. ARGV[1] .. ' stopped')
return tickets + slices
